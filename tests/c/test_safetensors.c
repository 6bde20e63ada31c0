/*
 * test_safetensors.c - the safetensors reader and checkpoint directories: good files bind to the right
 * bytes, every kind of bad file gives one error that names file and byte and leaves nothing open.
 */
#include "check.h"

#include <fcntl.h>

#include "checkpoint.h"

/* ---- building files ------------------------------------------------------------------------------ */

typedef struct image {
    uint8_t bytes[4096];
    size_t n_bytes;
} image;

/* length, header, then n_data bytes 0, 1, 2, ... */
static image make_image_of_length(uint64_t length, const char *header, size_t n_data)
{
    image made = {.n_bytes = 8 + strlen(header) + n_data};
    if (made.n_bytes > sizeof made.bytes) exit(2);
    for (int i = 0; i < 8; i++)
        made.bytes[i] = (uint8_t)(length >> 8 * i);
    memcpy(made.bytes + 8, header, strlen(header));
    for (size_t i = 0; i < n_data; i++)
        made.bytes[8 + strlen(header) + i] = (uint8_t)i;
    return made;
}

static image make_image(const char *header, size_t n_data)
{
    return make_image_of_length(strlen(header), header, n_data);
}

static kestrel_status parse(const image *from, ks_safetensors *result, kestrel_error *error)
{
    memset(error, 0, sizeof *error);
    return ks_safetensors_parse(from->bytes, from->n_bytes, "x.st", result, error);
}

static void check_refused(int line, const image *from, kestrel_status code, long long offset,
                          const char *part)
{
    ks_safetensors result;
    kestrel_error error;
    char front[64];
    snprintf(front, sizeof front, "x.st: byte %lld: ", offset);
    kestrel_status status = parse(from, &result, &error);
    if (status != code || error.code != (int32_t)code || !strstr(error.message, part) ||
        strncmp(error.message, front, strlen(front)) != 0)
        check_fail(__FILE__, line, "%s \"%s\" instead of %s \"%s... %s\"",
                   kestrel_status_name(status), error.message, kestrel_status_name(code), front,
                   part);
    if (status != KESTREL_OK && (result.header || result.tensors || result.n_tensors))
        check_fail(__FILE__, line, "something is left of a refused file");
    ks_safetensors_free(&result);
}

/* `where` is a part of the header at which the error must point, or NULL and `offset` counts. */
static void refuse(int line, const char *header, size_t n_data, kestrel_status code,
                   const char *where, const char *part)
{
    image made = make_image(header, n_data);
    const char *found = strstr(header, where);
    if (!found)
        check_fail(__FILE__, line, "the test's header lacks %s", where);
    else
        check_refused(line, &made, code, 8 + (found - header), part);
}
#define REFUSE(header, n_data, where, part)                                                        \
    refuse(__LINE__, header, n_data, KESTREL_FORMAT, where, part)
#define REFUSE_UNSUPPORTED(header, n_data, where, part)                                            \
    refuse(__LINE__, header, n_data, KESTREL_UNSUPPORTED, where, part)

#define TENSOR(name, dtype, shape, begin, end)                                                     \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end \
    "]}"

static int count_open_files(void)
{
    int n = 0;
    for (int fd = 0; fd < 256; fd++)
        n += fcntl(fd, F_GETFD) != -1;
    return n;
}

/* ---- headers in memory --------------------------------------------------------------------------- */

static void test_good_file(void)
{
    image made =
        make_image("{\"__metadata__\":{\"format\":\"pt\"}," TENSOR("b", "BF16", "[2,3]", 4, 16) //
                   "," TENSOR("a", "F32", "[]", 0, 4) //
                   "," TENSOR("c", "U8", "[5]", 16, 21) //
                   "," TENSOR("e", "F32", "[0,7]", 21, 21) //
                   "," TENSOR("d", "F16", "[1,1]", 21, 23) "}   ",
                   23);
    ks_safetensors result;
    kestrel_error error;
    REQUIRE(parse(&made, &result, &error) == KESTREL_OK);
    CHECK_EQ_INT(result.n_tensors, 5);
    static const char *const names[] = {"a", "b", "c", "e", "d"};
    static const size_t sizes[] = {4, 12, 5, 0, 2};
    size_t at = made.n_bytes - 23;
    for (int i = 0; i < 5; i++) {
        const ks_tensor *tensor = &result.tensors[i];
        CHECK_EQ_STR(tensor->name, names[i]);
        CHECK_EQ_STR(tensor->file, "x.st");
        CHECK_EQ_INT(tensor->n_bytes, sizes[i]);
        CHECK_EQ_INT(tensor->file_offset, at);
        CHECK(tensor->data == made.bytes + at);
        at += sizes[i];
    }
    CHECK_EQ_INT(result.tensors[0].n_dims, 0);
    CHECK_EQ_INT(result.tensors[1].n_dims, 2);
    CHECK_EQ_INT(result.tensors[1].shape[0], 2);
    CHECK_EQ_INT(result.tensors[1].shape[1], 3);
    CHECK_EQ_INT(result.tensors[1].dtype, KS_DTYPE_BF16);
    CHECK_EQ_INT(result.tensors[2].dtype, KS_DTYPE_U8);
    CHECK_EQ_INT(result.tensors[4].dtype, KS_DTYPE_F16);
    CHECK_EQ_STR(ks_json_get(result.metadata, "format")->string, "pt");
    ks_safetensors_free(&result);
    CHECK(result.tensors == NULL);
    CHECK_EQ_STR(ks_dtype_name(KS_DTYPE_F16), "F16");
    CHECK_EQ_INT(ks_dtype_size(KS_DTYPE_BF16), 2);
}

static void test_empty_header(void)
{
    ks_safetensors result;
    kestrel_error error;
    image made = make_image("{}", 0);
    CHECK_EQ_INT(parse(&made, &result, &error), KESTREL_OK);
    CHECK_EQ_INT(result.n_tensors, 0);
    CHECK(result.metadata == NULL);
    ks_safetensors_free(&result);
    made = make_image("{\"__metadata__\":null}", 0);
    CHECK_EQ_INT(parse(&made, &result, &error), KESTREL_OK);
    ks_safetensors_free(&result);
}

static void test_header_length(void)
{
    static const struct {
        uint64_t length;
        const char *part;
    } cases[] = {
        {0, "header of 0 bytes"},
        {3, "header of 3 bytes in a file of 10"},
        {99999999, "header of 99999999 bytes in a file of 10"},
        {100000000, "header of 100000000 bytes in a file"},
        {100000001, "more than the 100000000"},
        {(uint64_t)1 << 63, "header of 9223372036854775808 bytes, more than"},
        {UINT64_MAX, "header of 18446744073709551615 bytes, more than"},
        {UINT64_MAX - 7, "more than"}, /* + 8 would be 0 */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        image made = make_image_of_length(cases[i].length, "{}", 0);
        check_refused(__LINE__, &made, KESTREL_FORMAT, 0, cases[i].part);
    }
    image made = make_image("{}", 0);
    for (made.n_bytes = 0; made.n_bytes < 8; made.n_bytes++)
        check_refused(__LINE__, &made, KESTREL_FORMAT, 0, "too few for a header length");
    made.n_bytes = 8;
    check_refused(__LINE__, &made, KESTREL_FORMAT, 0, "in a file of 8");
}

static void test_header_text(void)
{
    REFUSE(" {}", 0, " {}", "does not begin with '{'");
    REFUSE("[]", 0, "[]", "does not begin with '{'");
    image cut = make_image("{\"a\":", 0);
    check_refused(__LINE__, &cut, KESTREL_FORMAT, 13, "the text ends");
    REFUSE("{} x", 0, "x", "'x'");
    REFUSE("{\"a\":1}", 0, "1", "tensor \"a\" is a number");
    REFUSE("{\"a\":[]}", 0, "[]", "tensor \"a\" is an array");
    REFUSE("{" TENSOR("a", "F32", "[1]", 0, 4) "," TENSOR("a", "F32", "[1]", 0, 4) "}", 4,
           "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
           "duplicate name \"a\"");
}

static void test_metadata(void)
{
    REFUSE("{\"__metadata__\":1}", 0, "1", "__metadata__ is a number");
    REFUSE("{\"__metadata__\":{\"n\":7}}", 0, "7", "\"n\" is a number, not a string");
    REFUSE("{\"__metadata__\":{\"n\":{}}}", 0, "{}", "\"n\" is an object, not a string");
}

static void test_members(void)
{
    REFUSE("{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "{\"shape", "has no dtype");
    REFUSE("{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "{\"dtype", "has no shape");
    REFUSE("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "{\"dtype", "has no data_offsets");
    REFUSE("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"strides\":[1]}}", 4,
           "{\"dtype", "has members beside");
}

static void test_dtypes(void)
{
    REFUSE("{\"a\":{\"dtype\":5,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "5,",
           "dtype is a number");
    REFUSE("{" TENSOR("a", "f32", "[1]", 0, 4) "}", 4, "\"f32\"", "unknown dtype \"f32\"");
    REFUSE("{" TENSOR("a", "", "[1]", 0, 4) "}", 4, "\"\"", "unknown dtype \"\"");
    REFUSE_UNSUPPORTED("{" TENSOR("a", "F64", "[1]", 0, 8) "}", 8, "\"F64\"",
                       "tensor \"a\" has dtype F64; supported: F32, BF16, F16, U8");
    REFUSE_UNSUPPORTED("{" TENSOR("ids", "I64", "[1]", 0, 8) "}", 8, "\"I64\"", "\"ids\"");
    REFUSE_UNSUPPORTED("{" TENSOR("a", "F8_E4M3", "[8]", 0, 8) "}", 8, "\"F8", "F8_E4M3");
}

static void test_shapes(void)
{
    REFUSE("{" TENSOR("a", "F32", "4", 0, 4) "}", 4, "4,\"data", "shape is a number");
    REFUSE("{" TENSOR("a", "F32", "[-1]", 0, 4) "}", 4, "-1", "no whole number");
    REFUSE("{" TENSOR("a", "F32", "[1.0]", 0, 4) "}", 4, "1.0", "no whole number");
    REFUSE("{" TENSOR("a", "F32", "[\"1\"]", 0, 4) "}", 4, "\"1\"", "no whole number");
    REFUSE("{" TENSOR("a", "F32", "[9223372036854775808]", 0, 4) "}", 4, "922", "no whole number");
    REFUSE_UNSUPPORTED("{" TENSOR("a", "F32", "[1,1,1,1,1,1,1,1,1]", 0, 4) "}", 4, "[1,",
                       "has 9 dimensions");
    ks_safetensors result;
    kestrel_error error;
    image made = make_image("{" TENSOR("a", "F32", "[1,1,1,1,1,1,1,1]", 0, 4) "}", 4);
    CHECK_EQ_INT(parse(&made, &result, &error), KESTREL_OK);
    ks_safetensors_free(&result);
}

static void test_overflows(void)
{
    /* 2^62 floats are 2^64 bytes, which is 0 in 64 bits: the size of this empty span. */
    REFUSE("{" TENSOR("a", "F32", "[4611686018427387904]", 0, 0) "}", 0, "[46", "overflows");
    REFUSE("{" TENSOR("a", "U8", "[4294967296,4294967296]", 0, 0) "}", 0, "[42", "overflows");
    REFUSE("{" TENSOR("a", "U8", "[9223372036854775807,2]", 0, 0) "}", 0, "[92", "overflows");
    REFUSE("{" TENSOR("a", "U8", "[0,9223372036854775807,2]", 0, 0) "}", 0, "[0,9", "overflows");
    REFUSE("{" TENSOR("a", "U8", "[9223372036854775807,2,0]", 0, 0) "}", 0, "[92", "overflows");
    REFUSE("{" TENSOR("a", "U8", "[9223372036854775807]", 0, 4) "}", 4, "[0,4]",
           "span 4 bytes, shape and dtype make 9223372036854775807");
}

static void test_offsets(void)
{
    REFUSE("{" TENSOR("a", "F32", "[1]", 4, 0) "}", 4, "[4,0]", "begin at 4 and end at 0");
    REFUSE("{" TENSOR("a", "F32", "[1]", -4, 0) "}", 4, "[-4,0]", "not two byte offsets");
    REFUSE("{" TENSOR("a", "F32", "[1]", 0, 4.0) "}", 4, "[0,4.0]", "not two byte offsets");
    REFUSE("{" TENSOR("a", "F32", "[1]", 0, 18446744073709551616) "}", 4, "[0,1",
           "not two byte offsets");
    REFUSE("{" TENSOR("a", "F32", "[1]", 0, 8) "}", 4, "[0,8]", "end at 8, the file has 4");
    REFUSE("{" TENSOR("a", "U8", "[5]", 0, 5) "}", 4, "[0,5]", "end at 5, the file has 4");
    REFUSE("{" TENSOR("a", "F32", "[1]", 9223372036854775803, 9223372036854775807) "}", 4, "[92",
           "the file has 4");
    REFUSE("{" TENSOR("a", "F32", "[2]", 0, 4) "}", 4, "[0,4]",
           "span 4 bytes, shape and dtype make 8");
    REFUSE("{" TENSOR("a", "BF16", "[1]", 0, 4) "}", 4, "[0,4]", "dtype make 2");
    REFUSE("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4, "[0]", "not two");
    REFUSE("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[]}}", 4, "[]", "not two");
    REFUSE("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,4]}}", 4, "[0,4,4]",
           "not two");
    REFUSE("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":{\"b\":0,\"e\":4}}}", 4,
           "{\"b", "not two");
}

static void refuse_coverage(int line, const char *header, size_t n_data, long long data_offset,
                            const char *part)
{
    image made = make_image(header, n_data);
    check_refused(line, &made, KESTREL_FORMAT, 8 + (long long)strlen(header) + data_offset, part);
}

static void test_coverage(void)
{
    refuse_coverage(__LINE__, "{}", 1, 0, "the last 1 bytes of the file belong to no tensor");
    refuse_coverage(__LINE__, "{" TENSOR("a", "U8", "[4]", 0, 4) "}", 6, 4, "the last 2 bytes");
    refuse_coverage(__LINE__, "{" TENSOR("a", "U8", "[4]", 2, 6) "}", 6, 0,
                    "2 bytes before tensor \"a\" belong to no tensor");
    refuse_coverage(__LINE__,
                    "{" TENSOR("b", "U8", "[2]", 4, 6) "," TENSOR("a", "U8", "[3]", 0, 3) "}", 6, 3,
                    "1 bytes before tensor \"b\"");
    refuse_coverage(__LINE__,
                    "{" TENSOR("b", "U8", "[3]", 3, 6) "," TENSOR("a", "U8", "[4]", 0, 4) "}", 6, 3,
                    "the data of tensor \"b\" overlap those of \"a\"");
    refuse_coverage(__LINE__,
                    "{" TENSOR("b", "U8", "[4]", 0, 4) "," TENSOR("a", "U8", "[4]", 0, 4) "}", 4, 0,
                    "the data of tensor \"b\" overlap those of \"a\"");
    refuse_coverage(__LINE__,
                    "{" TENSOR("b", "U8", "[0]", 2, 2) "," TENSOR("a", "U8", "[4]", 0, 4) "}", 4, 2,
                    "the data of tensor \"b\" overlap those of \"a\"");
}

/* ---- directories --------------------------------------------------------------------------------- */

static void write_image(const char *name, const char *header, size_t n_data)
{
    image made = make_image(header, n_data);
    check_write(name, made.bytes, made.n_bytes);
}

/* Opens the temporary directory and demands a refusal that contains both parts. */
static void refuse_directory(int line, const char *path, kestrel_status code, const char *part,
                             const char *second_part)
{
    ks_checkpoint *checkpoint = (ks_checkpoint *)"untouched";
    kestrel_error error = {0};
    int n_open = count_open_files();
    kestrel_status status = ks_checkpoint_open(path, &checkpoint, &error);
    if (status != code || checkpoint != NULL || !strstr(error.message, part) ||
        !strstr(error.message, second_part))
        check_fail(__FILE__, line, "%s \"%s\" instead of %s \"%s ... %s\"",
                   kestrel_status_name(status), error.message, kestrel_status_name(code), part,
                   second_part);
    if (status == KESTREL_OK) ks_checkpoint_close(checkpoint);
    if (count_open_files() != n_open) check_fail(__FILE__, line, "a file was left open");
}
#define REFUSE_DIRECTORY(code, part, second_part)                                                  \
    refuse_directory(__LINE__, check_temp_dir(), KESTREL_##code, part, second_part)

static void test_single_file(void)
{
    check_clear_dir();
    write_image("model.safetensors",
                "{\"__metadata__\":{\"k\":\"v\"}," TENSOR("b", "U8", "[2]", 0, 2) //
                "," TENSOR("a.weight", "U8", "[3]", 2, 5) "}",
                5);
    ks_checkpoint *checkpoint;
    kestrel_error error;
    int n_open = count_open_files();
    REQUIRE(ks_checkpoint_open(check_temp_dir(), &checkpoint, &error) == KESTREL_OK);
    CHECK_EQ_INT(count_open_files(), n_open);
    CHECK_EQ_INT(ks_checkpoint_n_tensors(checkpoint), 2);
    CHECK_EQ_STR(ks_checkpoint_tensor(checkpoint, 0)->name, "a.weight");
    CHECK_EQ_STR(ks_checkpoint_tensor(checkpoint, 1)->name, "b");
    const ks_tensor *tensor = ks_checkpoint_find(checkpoint, "a.weight");
    CHECK(tensor == ks_checkpoint_tensor(checkpoint, 0));
    CHECK_EQ_INT(tensor->data[0], 2);
    CHECK_EQ_INT(tensor->data[2], 4);
    CHECK_EQ_STR(tensor->file, check_path("model.safetensors"));
    CHECK(ks_checkpoint_find(checkpoint, "a") == NULL);
    CHECK(ks_checkpoint_find(checkpoint, "__metadata__") == NULL);
    CHECK_EQ_STR(ks_checkpoint_metadata(checkpoint, "k"), "v");
    CHECK(ks_checkpoint_metadata(checkpoint, "l") == NULL);
    ks_checkpoint_close(checkpoint);
    ks_checkpoint_close(NULL);
}

static void test_no_tensors(void)
{
    check_clear_dir();
    write_image("model.safetensors", "{}", 0);
    ks_checkpoint *checkpoint;
    REQUIRE(ks_checkpoint_open(check_temp_dir(), &checkpoint, NULL) == KESTREL_OK);
    CHECK_EQ_INT(ks_checkpoint_n_tensors(checkpoint), 0);
    CHECK(ks_checkpoint_find(checkpoint, "a") == NULL);
    ks_checkpoint_close(checkpoint);
}

static void test_not_there(void)
{
    check_clear_dir();
    REFUSE_DIRECTORY(IO, check_temp_dir(), "has neither model.safetensors nor");
    refuse_directory(__LINE__, check_path("nowhere"), KESTREL_IO, "nowhere", "cannot be opened");
    const char *file = check_write_text("file", "x");
    refuse_directory(__LINE__, file, KESTREL_IO, "file", "is not a directory");
    refuse_directory(__LINE__, "", KESTREL_IO, "", "cannot be opened");
}

static void test_odd_files(void)
{
    check_clear_dir();
    check_write_text("model.safetensors", "");
    REFUSE_DIRECTORY(FORMAT, "model.safetensors: byte 0", "the file has 0 bytes");
    unlink(check_path("model.safetensors"));
    REQUIRE(mkdir(check_path("model.safetensors"), 0700) == 0);
    REFUSE_DIRECTORY(IO, "model.safetensors", "is a directory");
    rmdir(check_path("model.safetensors"));
    REQUIRE(mkfifo(check_path("model.safetensors"), 0600) == 0); /* opening it must not wait */
    REFUSE_DIRECTORY(IO, "model.safetensors", "is not a regular file");
    unlink(check_path("model.safetensors"));
    REQUIRE(symlink("/dev/zero", check_path("model.safetensors")) == 0);
    REFUSE_DIRECTORY(IO, "model.safetensors", "is not a regular file");
    unlink(check_path("model.safetensors"));
    REQUIRE(symlink("model.safetensors", check_path("model.safetensors")) == 0);
    REFUSE_DIRECTORY(IO, "model.safetensors", "cannot be opened");
}

static void test_unreadable_file(void)
{
    check_clear_dir();
    write_image("model.safetensors", "{}", 0);
    REQUIRE(chmod(check_path("model.safetensors"), 0) == 0);
    bool is_root = geteuid() == 0; /* root reads everything, so become nobody for the call */
    if (is_root) REQUIRE(seteuid(65534) == 0);
    REFUSE_DIRECTORY(IO, "model.safetensors", "Permission denied");
    if (is_root) REQUIRE(seteuid(0) == 0);
}

/* ---- shards -------------------------------------------------------------------------------------- */

#define INDEX "model.safetensors.index.json"

/* Two shards, "one.st" with tensors a and c, "two.st" with b, and an index of that weight_map. */
static void write_shards(const char *weight_map)
{
    char index[1024];
    check_clear_dir();
    write_image("one.st", "{" TENSOR("a", "U8", "[2]", 0, 2) "," TENSOR("c", "U8", "[1]", 2, 3) "}",
                3);
    write_image("two.st", "{\"__metadata__\":{\"k\":\"2\"}," TENSOR("b", "F32", "[1]", 0, 4) "}",
                4);
    snprintf(index, sizeof index, "{\"metadata\":{\"total_size\":7},\"weight_map\":%s}",
             weight_map);
    check_write_text(INDEX, index);
}

static void test_shards(void)
{
    ks_checkpoint *checkpoint;
    kestrel_error error;
    write_shards("{\"c\":\"one.st\",\"b\":\"two.st\",\"a\":\"one.st\"}");
    int n_open = count_open_files();
    REQUIRE(ks_checkpoint_open(check_temp_dir(), &checkpoint, &error) == KESTREL_OK);
    CHECK_EQ_INT(count_open_files(), n_open);
    CHECK_EQ_INT(ks_checkpoint_n_tensors(checkpoint), 3);
    CHECK_EQ_STR(ks_checkpoint_tensor(checkpoint, 1)->name, "b");
    CHECK_EQ_STR(ks_checkpoint_find(checkpoint, "b")->file, check_path("two.st"));
    CHECK_EQ_STR(ks_checkpoint_find(checkpoint, "c")->file, check_path("one.st"));
    CHECK_EQ_INT(ks_checkpoint_find(checkpoint, "c")->data[0], 2);
    CHECK_EQ_STR(ks_checkpoint_metadata(checkpoint, "k"), "2");
    ks_checkpoint_close(checkpoint);
    /* A single file wins over an index. */
    write_image("model.safetensors", "{" TENSOR("z", "U8", "[2]", 0, 2) "}", 2);
    REQUIRE(ks_checkpoint_open(check_temp_dir(), &checkpoint, &error) == KESTREL_OK);
    CHECK_EQ_INT(ks_checkpoint_n_tensors(checkpoint), 1);
    ks_checkpoint_close(checkpoint);
}

static void test_index_text(void)
{
    check_clear_dir();
    check_write_text(INDEX, "");
    REFUSE_DIRECTORY(FORMAT, INDEX ": byte 0", "the text ends");
    check_write_text(INDEX, "{\"weight_map\":{}");
    REFUSE_DIRECTORY(FORMAT, INDEX ": byte 16", "the text ends");
    check_write_text(INDEX, "[]");
    REFUSE_DIRECTORY(FORMAT, INDEX ": byte 0", "no object weight_map");
    check_write_text(INDEX, "{\"weight_map\": []}");
    REFUSE_DIRECTORY(FORMAT, INDEX ": byte 15", "no object weight_map");
    check_write_text(INDEX, "{\"weight_map\": {}}");
    REFUSE_DIRECTORY(FORMAT, INDEX ": byte 15", "weight_map is empty");
    check_write_text(INDEX, "{\"weight_map\": {\"a\": 1}}");
    REFUSE_DIRECTORY(FORMAT, INDEX ": byte 21", "the shard of tensor \"a\" is a number");
    check_write_text(INDEX, "{\"weight_map\": {\"a\": \"x\", \"a\": \"x\"}}");
    REFUSE_DIRECTORY(FORMAT, INDEX ": byte 26", "duplicate name \"a\"");
    unlink(check_path(INDEX));
    REQUIRE(mkdir(check_path(INDEX), 0700) == 0);
    REFUSE_DIRECTORY(IO, INDEX, "is a directory");
}

static void test_shard_names(void)
{
    static const char *const names[] = {"",           ".",           "..",         "../one.st",
                                        "sub/one.st", "/etc/passwd", "\\\\one.st", "one.st/"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char map[256];
        snprintf(map, sizeof map, "{\"a\":\"one.st\",\"b\":\"%s\"}", names[i]);
        write_shards(map);
        REFUSE_DIRECTORY(FORMAT, INDEX ": byte 60", "is not a file name in the directory");
    }
    write_shards("{\"a\":\"one.st\\u0000\"}");
    REFUSE_DIRECTORY(FORMAT, INDEX ": byte 54", "\\u0000");
}

static void test_missing_shard(void)
{
    write_shards("{\"a\":\"one.st\",\"c\":\"one.st\",\"b\":\"three.st\"}");
    REFUSE_DIRECTORY(IO, INDEX ": byte 73", "the shard \"three.st\" is missing");
    write_shards("{\"a\":\"one.st\",\"c\":\"one.st\",\"b\":\"two.st\"}");
    check_write_text("two.st", "short");
    REFUSE_DIRECTORY(FORMAT, "two.st: byte 0", "too few");
    unlink(check_path("two.st"));
    REQUIRE(mkfifo(check_path("two.st"), 0600) == 0);
    REFUSE_DIRECTORY(IO, "two.st", "is not a regular file");
}

static void test_index_disagrees(void)
{
    /* In the index, in no shard. */
    write_shards("{\"a\":\"one.st\",\"c\":\"one.st\",\"b\":\"two.st\",\"d\":\"two.st\"}");
    REFUSE_DIRECTORY(FORMAT, INDEX ": byte 86", "tensor \"d\" is not in two.st");
    write_shards("{\"a\":\"one.st\",\"c\":\"one.st\",\"b\":\"two.st\",\"aa\":\"two.st\"}");
    REFUSE_DIRECTORY(FORMAT, INDEX ": byte 87", "tensor \"aa\" is not in two.st");
    /* In another shard than the index says. */
    write_shards("{\"a\":\"two.st\",\"c\":\"one.st\",\"b\":\"two.st\"}");
    REFUSE_DIRECTORY(FORMAT, INDEX ": byte 47", "tensor \"a\" is not in two.st");
    /* In a shard, not in the index: in the middle of the names and at their end. */
    write_shards("{\"a\":\"one.st\",\"b\":\"two.st\"}");
    REFUSE_DIRECTORY(FORMAT, "one.st: byte ", "tensor \"c\" is not in " INDEX);
    write_shards("{\"c\":\"one.st\",\"b\":\"two.st\"}");
    REFUSE_DIRECTORY(FORMAT, "one.st: byte ", "tensor \"a\" is not in " INDEX);
    /* In two shards. */
    write_shards("{\"a\":\"one.st\",\"c\":\"one.st\",\"b\":\"two.st\"}");
    write_image("two.st", "{" TENSOR("b", "U8", "[1]", 0, 1) "," TENSOR("c", "U8", "[1]", 1, 2) "}",
                2);
    REFUSE_DIRECTORY(FORMAT, "tensor \"c\" is in", "as well");
}

/* A header of about 10 MB, as many tensors as no model has. */
static void test_large_header(void)
{
    enum { N = 100000 };
    char *header = malloc((size_t)N * 128), *out = header;
    REQUIRE(header);
    *out++ = '{';
    for (int i = 0; i < N; i++)
        out += sprintf(out,
                       "%s\"model.layers.%d.mlp.experts.%d.gate_proj.weight\":"
                       "{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%d,%d]}",
                       i ? "," : "", i % 64, i, i, i + 1);
    *out++ = '}';
    size_t n_header = (size_t)(out - header), n_bytes = 8 + n_header + N;
    uint8_t *bytes = calloc(1, n_bytes);
    REQUIRE(bytes);
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(n_header >> 8 * i);
    memcpy(bytes + 8, header, n_header);
    free(header);
    check_clear_dir();
    check_write("model.safetensors", bytes, n_bytes);
    free(bytes);
    ks_checkpoint *checkpoint;
    REQUIRE(ks_checkpoint_open(check_temp_dir(), &checkpoint, NULL) == KESTREL_OK);
    CHECK_EQ_INT(ks_checkpoint_n_tensors(checkpoint), N);
    for (int i = 0; i < N; i++) {
        char name[80];
        snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.gate_proj.weight", i % 64, i);
        const ks_tensor *tensor = ks_checkpoint_find(checkpoint, name);
        REQUIRE(tensor && tensor->file_offset == 8 + n_header + (size_t)i);
    }
    ks_checkpoint_close(checkpoint);
}

int main(void)
{
    RUN(test_good_file);
    RUN(test_empty_header);
    RUN(test_header_length);
    RUN(test_header_text);
    RUN(test_metadata);
    RUN(test_members);
    RUN(test_dtypes);
    RUN(test_shapes);
    RUN(test_overflows);
    RUN(test_offsets);
    RUN(test_coverage);
    RUN(test_single_file);
    RUN(test_no_tensors);
    RUN(test_not_there);
    RUN(test_odd_files);
    RUN(test_unreadable_file);
    RUN(test_shards);
    RUN(test_index_text);
    RUN(test_shard_names);
    RUN(test_missing_shard);
    RUN(test_index_disagrees);
    RUN(test_large_header);
    return check_summary();
}
