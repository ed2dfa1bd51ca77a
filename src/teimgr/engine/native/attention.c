// Attention within the texts of a packed row, for CPUs: softmax(scale · q kᵀ) v by text and head, without padding.
//
// Plain C over pointers, called through ctypes (attention_kernel.py): no headers of Python or torch. The arithmetic is in
// attention_tile.h, compiled once per instruction set; `attention_level` chooses among them when the library is loaded.
// Softmax is computed block by block over the keys (Dao et al., "FlashAttention", 2022), with sums in float32.

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// Runs `body(data)` on `threads` threads (0: as many as OpenMP would), as libgomp's GOMP_parallel does.
typedef void (*parallel_function)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

// Strides are in elements; within a head the elements are contiguous. Text i has the tokens begins[i] to begins[i + 1].
struct attention {
    const void *query, *key, *value;
    void *out;                                         // [tokens, heads, head_size], contiguous
    int64_t query_stride[2], key_stride[2], value_stride[2];  // of a token, of a head
    const int32_t *begins;                             // [texts + 1]
    const int32_t *keys;                               // [texts]: its leading tokens that are keys; NULL: all
    int64_t texts, longest;                            // number of texts, tokens of the longest
    int64_t heads, key_heads, head_size;               // key_heads divides heads
    int64_t reach;                                     // a window of so many tokens to each side; -1: no window
    int32_t causal;
    int32_t bfloat16;                                  // 1: bfloat16 in and out; 0: float32
    int32_t level;                                     // of `attention_level`, or a lower one
    float scale;
    parallel_function parallel;                        // NULL: on the calling thread
};

enum { BASELINE, AVX2, AVX512, AVX512_BF16 };
enum { DONE, NO_MEMORY, UNSUPPORTED };

enum {
    ROWS = 4,            // queries that share a load of the keys
    KEY_BLOCK = 1024,    // keys of a head that are repacked at a time: they stay in the second-level cache
    QUERY_CHUNK = 512,   // queries of a text and head that one thread takes at a time
    ALIGNMENT = 64,
};

static const float NOTHING = -1e30f;  // the score of a masked key, and the maximum of a row before its first key

// A thread's memory, laid out by `new_scratch`.
struct scratch {
    void *keys;          // the block's keys, transposed
    void *values;        // the block's values
    void *queries;       // ROWS queries
    float *scores;       // [ROWS, KEY_BLOCK]
    void *weights;       // [ROWS, KEY_BLOCK] probabilities before division by their sum, in bfloat16
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

static inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

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

// Zeros for the queries that see no key: those further from the last key than the window reaches.
static void clear_blind_rows(const struct attention *call, const struct item *item) {
    const int64_t group = call->heads / call->key_heads, bytes = call->head_size * (call->bfloat16 ? 2 : 4);
    for (int64_t row = item->first; row < item->last; row++) {
        const struct range seen = visible_keys(call, item, row);
        if (seen.begin < seen.end) continue;
        const int64_t at = (item->begin + row) * call->heads + item->key_head * group;
        memset((char *)call->out + at * bytes, 0, (size_t)(group * bytes));
    }
}

static inline float from_bfloat16(uint16_t value) {
    const uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

// To the nearest, ties to even; NaN stays NaN. Without a branch, for the vectorizer.
static inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
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
#endif

// The best instruction set of this CPU that the library has code for.
int attention_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) return AVX512_BF16;
    if (avx512) return AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
    return BASELINE;
}

static void attend(const struct attention *call, const struct scratch *scratch, const struct item *item) {
#if defined(__x86_64__)
    switch (call->level) {
    case AVX512_BF16:
        if (call->bfloat16) {
            attend_avx512_bf16(call, scratch, item);
            return;
        }  // fall through
    case AVX512: attend_avx512(call, scratch, item); return;
    case AVX2: attend_avx2(call, scratch, item); return;
    }
#endif
    attend_baseline(call, scratch, item);
}

// The parts of one allocation; NULL where there is no memory.
static void *new_scratch(const struct attention *call, struct scratch *scratch) {
    const int64_t block = lesser(KEY_BLOCK, round_up(call->longest, 64)), width = round_up(call->head_size, 16);
    const int64_t rows = call->longest > KEY_BLOCK ? call->heads / call->key_heads * QUERY_CHUNK : 0;
    const int64_t sizes[] = {
        block * width * 4, block * width * 4, ROWS * width * 4, ROWS * block * 4, ROWS * block * 2,
        rows * width * 4,  rows * 4,          rows * 4,
    };
    void **parts[] = {
        &scratch->keys,    &scratch->values,         &scratch->queries,        (void **)&scratch->scores,
        &scratch->weights, (void **)&scratch->result, (void **)&scratch->maximum, (void **)&scratch->sum,
    };
    int64_t total = 0;
    for (int i = 0; i < 8; i++) total += round_up(sizes[i], ALIGNMENT);
    char *memory = aligned_alloc(ALIGNMENT, (size_t)total);
    char *next = memory;
    for (int i = 0; memory != NULL && i < 8; i++) {
        *parts[i] = next;
        next += round_up(sizes[i], ALIGNMENT);
    }
    return memory;
}

struct work {
    const struct attention *call;
    int64_t chunks;           // of the longest text
    atomic_llong next;        // the item to take next
    atomic_int status;
};

// Takes items until none is left, those of the longest texts first: threads finish at about the same time.
static void take_items(void *data) {
    struct work *work = data;
    const struct attention *call = work->call;
    const int64_t heads = call->key_heads, count = call->texts * heads * work->chunks;
    struct scratch scratch = {0};
    void *memory = NULL;
    for (;;) {
        const int64_t i = atomic_fetch_add_explicit(&work->next, 1, memory_order_relaxed);
        if (i >= count) break;
        struct item item = {.text = call->texts - 1 - i / (heads * work->chunks), .key_head = i / work->chunks % heads};
        item.begin = call->begins[item.text];
        item.length = call->begins[item.text + 1] - item.begin;
        item.keys = call->keys == NULL ? item.length : lesser(call->keys[item.text], item.length);
        item.first = i % work->chunks * QUERY_CHUNK;
        item.last = lesser(item.first + QUERY_CHUNK, item.length);
        if (item.first >= item.length) continue;
        if (memory == NULL && (memory = new_scratch(call, &scratch)) == NULL) {
            atomic_store(&work->status, NO_MEMORY);
            break;
        }
        attend(call, &scratch, &item);
    }
    free(memory);
}

// Computes `call->out`. Returns DONE, NO_MEMORY (`out` is then incomplete) or UNSUPPORTED.
int attention(const struct attention *call) {
    if (call->key_heads < 1 || call->heads % call->key_heads || call->head_size < 1 || call->head_size > 1024)
        return UNSUPPORTED;
    struct work work = {.call = call, .chunks = (call->longest + QUERY_CHUNK - 1) / QUERY_CHUNK};
    if (call->parallel != NULL)
        call->parallel(take_items, &work, 0, 0);
    else
        take_items(&work);
    return atomic_load(&work.status);
}
