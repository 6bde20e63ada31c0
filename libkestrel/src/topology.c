/*
 * topology.c - reads the clusters of a big.LITTLE machine from sysfs.
 *
 * On an RK3588 four Cortex-A76 (capacity 1024) stand beside four A55 (capacity 530). A row computed
 * by a slow core is waited for at the end of every job, so the default is the fast cluster alone.
 */
#define _GNU_SOURCE
#include "topology.h"

#include <sched.h>
#include <stdbool.h>
#include <stdio.h>

#include "pool.h"

static long read_number(const char *path)
{
    FILE *file = fopen(path, "re");
    long value = -1;
    if (file != NULL) {
        if (fscanf(file, "%ld", &value) != 1) {
            value = -1;
        }
        fclose(file);
    }
    return value;
}

/* A number that is larger for a faster core, -1 if the system does not say. */
static long core_speed(int32_t cpu)
{
    char path[96];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/cpu_capacity", cpu);
    long speed = read_number(path);
    if (speed < 0) {
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/cpufreq/cpuinfo_max_freq", cpu);
        speed = read_number(path);
    }
    return speed;
}

/* Boost tables give cores of one kind slightly different maximum frequencies: within an eighth is the
 * same cluster. */
static bool same_cluster(long speed, long fastest)
{
    return speed >= fastest - fastest / 8;
}

static int32_t fast_cluster(cpu_set_t *cluster)
{
    cpu_set_t allowed;
    CPU_ZERO(cluster);
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
        return 0;
    }
    long fastest = -1;
    for (int32_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &allowed)) {
            long speed = core_speed(cpu);
            fastest = speed > fastest ? speed : fastest;
        }
    }
    for (int32_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &allowed) && (fastest < 0 || same_cluster(core_speed(cpu), fastest))) {
            CPU_SET(cpu, cluster);
        }
    }
    return CPU_COUNT(cluster);
}

/* Whole cores of the cgroup v2 quota, 0 if there is none. */
static int32_t cgroup_cores(void)
{
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "re");
    long quota = 0;
    long period = 0;
    if (file == NULL) {
        return 0;
    }
    int32_t n_read = fscanf(file, "%ld %ld", &quota, &period);
    fclose(file);
    return n_read == 2 && period > 0 ? (int32_t)((quota + period - 1) / period) : 0;
}

int32_t ks_topology_default_threads(void)
{
    cpu_set_t cluster;
    int32_t n = fast_cluster(&cluster);
    int32_t quota = cgroup_cores();
    if (quota > 0 && quota < n) {
        n = quota;
    }
    if (n > KS_MAX_THREADS) {
        n = KS_MAX_THREADS;
    }
    return n < 1 ? 1 : n;
}

void ks_topology_bind_thread(pthread_t thread, int32_t n_threads)
{
    cpu_set_t cluster;
    if (fast_cluster(&cluster) >= n_threads) {
        pthread_setaffinity_np(thread, sizeof cluster, &cluster);
    }
}
