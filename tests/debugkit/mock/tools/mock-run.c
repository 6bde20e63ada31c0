/*
 * mock-run MODE [N_PROMPT [MAX_TOKENS [STOP_AFTER]]]: one completion on the mock library, or one of
 * the ways in which a traced program disappoints its tracer. The Python twin is host.py.
 */
#include "kestrel.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_PROMPT 4096

extern char **environ;

static volatile sig_atomic_t n_signals;

static void on_signal(int number)
{
    n_signals += number == SIGUSR1;
}

static void complete(kestrel_session *session, int32_t n_prompt, int32_t max_tokens,
                     int32_t stop_after)
{
    static int32_t ids[MAX_PROMPT];
    kestrel_request request = {.struct_size = sizeof request,
                               .prompt_ids = ids,
                               .n_prompt = n_prompt,
                               .max_tokens = max_tokens,
                               .stop_after = stop_after};
    kestrel_stats stats = {.struct_size = sizeof stats};
    kestrel_error error = {0};
    kestrel_run_completion(session, &request, &stats, &error);
    printf("generated %d\n", stats.n_generated);
    fprintf(stderr, "decodes %d\n", stats.n_decodes);
}

/* Text that looks like gdb/MI, and 10 MB without a newline, on both streams. */
static void print_noise(void)
{
    static char block[1 << 20];
    memset(block, 'x', sizeof block);
    fputs("*stopped,reason=\"fake\"\n1^done,bkpt={number=\"9\"}\n(gdb) \n", stdout);
    fputs("*stopped,reason=\"exited-normally\"\n", stderr);
    for (int i = 0; i < 10; i++) {
        fwrite(block, 1, sizeof block, stdout);
        fwrite(block, 1, sizeof block, stderr);
    }
    fflush(stdout);
}

/* Everything that happens before the completion, or instead of it (then it returns 1). */
static int prepare(const char *mode)
{
    if (!strcmp(mode, "nohit")) return 1;
    if (!strcmp(mode, "exit3")) exit(3);
    if (!strcmp(mode, "killed")) kill(getpid(), SIGTERM);
    if (!strcmp(mode, "noise")) print_noise();
    if (!strcmp(mode, "environ"))
        for (char **variable = environ; *variable; variable++)
            puts(*variable);
    if (!strcmp(mode, "sleep"))
        for (;;)
            pause();
    if (!strcmp(mode, "orphan") && fork() == 0)
        for (;;)
            pause();
    if (!strcmp(mode, "orphan")) wait(NULL);
    if (!strcmp(mode, "usr1")) {
        signal(SIGUSR1, on_signal);
        raise(SIGUSR1);
        printf("signals %d\n", (int)n_signals);
    }
    if (!strcmp(mode, "stdin")) {
        char line[256];
        while (fgets(line, sizeof line, stdin))
            printf("read %s", line);
    }
    return 0;
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "plain";
    int32_t n_prompt = argc > 2 ? atoi(argv[2]) : 18;
    int32_t max_tokens = argc > 3 ? atoi(argv[3]) : 32;
    int32_t stop_after = argc > 4 ? atoi(argv[4]) : 9;
    if (prepare(mode)) return 0;
    kestrel_session *session = mock_session_open(4, 4096);
    mock_set_fault(mode);
    if (!strcmp(mode, "null")) kestrel_prefill(NULL, NULL, 5, NULL);
    complete(session, n_prompt, max_tokens, stop_after);
    if (!strcmp(mode, "twice")) complete(session, n_prompt + 20, max_tokens, stop_after - 2);
    kestrel_session_close(session);
    return 0;
}
