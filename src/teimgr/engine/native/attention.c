// Attention within the texts of a packed row, for CPUs: softmax(scale · q kᵀ) v by text and head, without padding.
//
// Plain C over pointers, called through ctypes (attention_kernel.py): no headers of Python or torch. The arithmetic is in
// attention_tile.h, compiled once per instruction set; a call names one, up to that of `attention_level`.
// Softmax is computed block by block over the keys (Dao et al., "FlashAttention", 2022), with sums in float32.

#include <stdatomic.h>

#include "library.h"

enum {
    MAX_ROWS = 16,       // queries that are computed together
    MAX_TILED_HEAD = 256,  // numbers of a head that is multiplied by tiles
    KEY_BLOCK = 1024,    // keys of a head that are repacked at a time: they stay in the second-level cache
    QUERY_CHUNK = 512,   // queries of a text and head that one thread takes at a time
};

static const float NOTHING = -1e30f;  // the score of a masked key, and the maximum of a row before its first key

// A thread's memory, laid out by `new_scratch`.
struct scratch {
    void *keys;          // the block's keys, transposed
    void *values;        // the block's values
    void *queries;       // MAX_ROWS queries
    float *scores;       // [MAX_ROWS, KEY_BLOCK]
    void *weights;       // [MAX_ROWS, KEY_BLOCK] probabilities before division by their sum, in bfloat16
    float *result;       // [heads of a key head, QUERY_CHUNK, padded head size] sums of earlier blocks
    float *maximum;      // [heads of a key head, QUERY_CHUNK]
    float *sum;          // as `maximum`
};

// One text and key head, and queries `first` to `last` of it.
struct item {
    int64_t text, key_head, first, last, begin, length, keys;
};

struct range {
    int64_t begin, end;
};

// The keys that query `row` of a text attends to.
static inline struct range visible_keys(const struct attention *call, const struct item *item, int64_t row) {
    struct range seen = {0, item->keys};
    if (call->reach >= 0) {
        seen.begin = greater(0, row - call->reach);
        seen.end = lesser(seen.end, row + call->reach + 1);
    }
    if (call->causal) seen.end = lesser(seen.end, row + 1);
    return seen;
}

// Zeros for the queries that see no key: those of a text without any, or further from the last than the window reaches.
static void clear_blind_rows(const struct attention *call, const struct item *item) {
    const int64_t group = call->heads / call->key_heads, bytes = call->bfloat16 ? 2 : 4;
    for (int64_t row = item->first; row < item->last; row++) {
        const struct range seen = visible_keys(call, item, row);
        if (seen.begin < seen.end) continue;
        const int64_t at = (item->begin + row) * call->out_stride + item->key_head * group * call->head_size;
        memset((char *)call->out + at * bytes, 0, (size_t)(group * call->head_size * bytes));
    }
}

#define LEVEL(name) name##_baseline
#define TARGET
#define WIDTH 4
#define COLUMNS 2
#define PAIRS 0
#include "attention_tile.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define LEVEL(name) name##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define WIDTH 8
#define COLUMNS 2
#define PAIRS 0
#include "attention_tile.h"

#define LEVEL(name) name##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
#define WIDTH 16
#define COLUMNS 4
#define PAIRS 0
#include "attention_tile.h"

#define LEVEL(name) name##_avx512_bf16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))
#define WIDTH 16
#define COLUMNS 4
#define PAIRS 1
#include "attention_tile.h"

#if defined(HAS_AMX)
#define LEVEL(name) name##_amx
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,amx-tile,amx-bf16")))
#define WIDTH 16
#define COLUMNS 4
#define PAIRS 1
#define TILES 1
#include "attention_tile.h"
#endif

#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#define LEVEL(name) name##_neon
#define TARGET
#define WIDTH 4
#define COLUMNS 4
#define PAIRS 0
#include "attention_tile.h"

#define LEVEL(name) name##_neon_bf16
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod+bf16+i8mm")))
#define WIDTH 4
#define COLUMNS 4
#define PAIRS 1
#include "attention_tile.h"
#endif

#if defined(HAS_AVX_VNNI)
#include <cpuid.h>

int has_avx_vnni(void) {
    static atomic_int has = -1;  // CPUID takes microseconds under a hypervisor
    if (atomic_load_explicit(&has, memory_order_relaxed) < 0) {
        unsigned last, a, b, c, d;
        __builtin_cpu_init();
        const int has_leaf = __get_cpuid_count(7, 0, &last, &b, &c, &d) && last >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d);
        atomic_store(&has, has_leaf && (a >> 4 & 1) && __builtin_cpu_supports("avx2"));  // the kernel saves its registers
    }
    return atomic_load_explicit(&has, memory_order_relaxed);
}
#endif

#if defined(HAS_AMX)
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

static int refusal;  // of `tiles_refusal`

// Whether the CPU has the tiles that are used here, and the kernel lets this process use them: it keeps their 8 KiB for each
// thread that does. A virtual machine may show the instructions and no palette of tiles.
static int may_use_tiles(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    const unsigned instructions = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & instructions) != instructions) return 0;
    if (!__builtin_cpu_supports("avx512vnni")) return 0;
    const int has_leaf = __get_cpuid_count(0x1d, 1, &a, &b, &c, &d);
    const int has_palette = has_leaf && b >> 16 >= 8 && (b & 0xffff) >= TILE_BYTES && (c & 0xffff) >= TILE_ROWS;
    if (!has_palette)
        refusal = NO_PALETTE;
    else if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) != 0)
        refusal = errno;
    return refusal == 0;
}
#endif

static int found_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const int avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
#if defined(HAS_AMX)
    if (avx512_bf16 && may_use_tiles()) return AMX;
#endif
    if (avx512_bf16) return AVX512_BF16;
    if (avx512) return AVX512;
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#if defined(HAS_AVX_VNNI)
    if (avx2 && has_avx_vnni()) return AVX_VNNI;
#endif
    if (avx2) return AVX2;
#elif defined(__aarch64__)
    enum { DOT = 1 << 20, BYTES = 1 << 13, BF16 = 1 << 14 };  // the kernel's HWCAP_ASIMDDP, HWCAP2_I8MM, HWCAP2_BF16
#if defined(__linux__)
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    if ((first & DOT) && (second & BYTES) && (second & BF16)) return NEON_BF16;
    if (first & DOT) return NEON_DOT;
#endif
    return NEON;
#endif
    return BASELINE;
}

int attention_level(void) {
    static atomic_int level = -1;  // of this process, found at its first call
    if (atomic_load_explicit(&level, memory_order_relaxed) < 0) atomic_store(&level, found_level());
    return atomic_load_explicit(&level, memory_order_relaxed);
}

#if defined(HAS_AMX)
int tiles_refusal(void) { return attention_level() == AMX ? 0 : refusal; }
#endif

static void attend(const struct attention *call, const struct scratch *scratch, const struct item *item) {
#if defined(__x86_64__)
#if defined(HAS_AMX)
    const int is_tiled = call->head_size % (TILE_BYTES / 2) == 0 && call->head_size <= MAX_TILED_HEAD;
    if (call->level == AMX && call->bfloat16 && is_tiled) {
        attend_amx(call, scratch, item);
        return;
    }
#endif
    switch (call->level) {
    case AMX:
    case AVX512_BF16:
        if (call->bfloat16) {
            attend_avx512_bf16(call, scratch, item);
            return;
        }  // fall through
    case AVX512: attend_avx512(call, scratch, item); return;
    case AVX_VNNI:
    case AVX2: attend_avx2(call, scratch, item); return;
    }
#elif defined(__aarch64__)
    if (call->level >= NEON_BF16 && call->bfloat16) {
        attend_neon_bf16(call, scratch, item);
        return;
    }
    if (call->level >= NEON) {
        attend_neon(call, scratch, item);
        return;
    }
#endif
    attend_baseline(call, scratch, item);
}

// Divides `memory` into the parts of `scratch`; returns the bytes that they take. NULL: only the bytes.
static int64_t lay_out(const struct attention *call, void *memory, struct scratch *scratch) {
    const int64_t block = lesser(KEY_BLOCK, round_up(call->longest, 64)), width = round_up(call->head_size, 16);
    const int64_t rows = call->longest > KEY_BLOCK ? call->heads / call->key_heads * QUERY_CHUNK : 0;
    const int64_t sizes[] = {
        block * width * 4, block * width * 4, MAX_ROWS * width * 4, MAX_ROWS * block * 4, MAX_ROWS * block * 2,
        rows * width * 4,  rows * 4,          rows * 4,
    };
    void **parts[] = {
        &scratch->keys,    &scratch->values,         &scratch->queries,        (void **)&scratch->scores,
        &scratch->weights, (void **)&scratch->result, (void **)&scratch->maximum, (void **)&scratch->sum,
    };
    int64_t total = 0;
    for (int i = 0; i < 8; i++) {
        if (memory != NULL) *parts[i] = (char *)memory + total;
        total += round_up(sizes[i], ALIGNMENT);
    }
    return total;
}

static int64_t chunks(const struct attention *call) { return (call->longest + QUERY_CHUNK - 1) / QUERY_CHUNK; }

int64_t attention_items(const struct attention *call) { return call->texts * call->key_heads * chunks(call); }

int64_t attention_scratch_bytes(const struct attention *call) {
    struct scratch scratch;
    return lay_out(call, NULL, &scratch);
}

void attention_item(const struct attention *call, void *memory, int64_t i) {
    const int64_t heads = call->key_heads, count = chunks(call);
    struct item item = {.text = call->texts - 1 - i / (heads * count), .key_head = i / count % heads};
    item.begin = call->begins[item.text];
    item.length = call->begins[item.text + 1] - item.begin;
    item.keys = call->keys == NULL ? item.length : lesser(call->keys[item.text], item.length);
    item.first = i % count * QUERY_CHUNK;
    item.last = lesser(item.first + QUERY_CHUNK, item.length);
    if (item.first >= item.length) return;
    struct scratch scratch;
    lay_out(call, memory, &scratch);
    attend(call, &scratch, &item);
}

struct work {
    const struct attention *call;
    atomic_llong next;        // the item to take next
    atomic_int status;
};

// Takes items until none is left, those of the longest texts first: threads finish at about the same time.
static void take_items(void *data) {
    struct work *work = data;
    const int64_t count = attention_items(work->call);
    void *memory = NULL;
    for (;;) {
        const int64_t i = atomic_fetch_add_explicit(&work->next, 1, memory_order_relaxed);
        if (i >= count) break;
        if (memory == NULL && (memory = aligned_alloc(ALIGNMENT, (size_t)attention_scratch_bytes(work->call))) == NULL) {
            atomic_store(&work->status, NO_MEMORY);
            break;
        }
        attention_item(work->call, memory, i);
    }
    free(memory);
}

// Computes `call->out`. Returns DONE, NO_MEMORY (`out` is then incomplete), or BAD_CALL.
int attention(const struct attention *call) {
    if (!attention_is_valid(call)) return BAD_CALL;
    struct work work = {.call = call};
    if (call->parallel != NULL)
        call->parallel(take_items, &work, 0, 0);
    else
        take_items(&work);
    return atomic_load(&work.status);
}
