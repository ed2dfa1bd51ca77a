// A forward as a list of steps over the rows of a packed batch, one row per token.

#pragma once

#include <stdatomic.h>

#include "library.h"

enum step_kind { EMBED, LINEAR, ATTEND, NORM, ADD, ACTIVATE, GATE, ROTATE, QUANTISE };
enum activation { NO_ACTIVATION, GELU, GELU_TANH, RELU, SILU, TANH, QUICK_GELU };
enum norm { LAYER_NORM, RMS_NORM };
enum index { IDS, POSITIONS, TYPES };
enum weights { WHOLE, HALF_BFLOAT16, HALF_FLOAT16 };
enum { INDICES = 3, MAX_TABLES = 4, NO_SLOT = -1 };

// A value of every token in a thread's memory: `stride` bytes a token, from `offset` bytes a token on.
struct slot {
    int64_t offset, stride;
};

// Columns of a slot, in elements from its first.
struct operand {
    int32_t slot;
    int64_t column;
};

// What a step reads and writes. "Operands" are what matrix products and attention read: bfloat16 or float32, as the
// program's; everything else is float32.
//   EMBED     scale · (the row `bias` + the rows of `tables` that the batch's ids, positions or types select)
//   LINEAR    activation(x Wᵀ + bias) + `with`; W in panels as `panel_width` says; `x` has operands, or where `scales`
//             is not NULL a row of QUANTISE, and W then has bytes; where operands are float32, W may be `halved`: each
//             weight in 16 bits, of which its float32 is made when it is read
//   ATTEND    softmax(scale · q kᵀ − slope · |i − j|) v of `x`, `with` and `third`, all operands; `bias` has the slope of
//             every head, or is NULL
//   NORM      of each of `groups` parts of `width` columns of `x`, times `weights`, plus `bias`
//   ADD       x + with, or x + the row `bias` where `with` has no slot
//   ACTIVATE  activation(x)
//   GATE      activation(x) · with
//   ROTATE    each of `groups` heads of `width` columns: x · cos + (−second half, first half) · sin, where
//             `tables` has the cosines and sines of every position, [positions, width]
//   QUANTISE  `inner` columns of `x`, operands, as bytes q with x ≈ scale · (q − zero), and a struct row_scale behind
//             them, `width` bytes in all; scale and zero are those of the row's smallest and largest number and 0
// The result is written as float32 where `floats` has a slot, and as operands where `operands` has one.
struct step {
    int32_t kind, activation, norm, causal;
    struct operand x, with, third;
    int32_t floats, operands;
    int32_t halved;                            // of `enum weights`
    int64_t width, inner;                      // columns of the result (of a group), columns of `x` that are multiplied
    int64_t groups;
    const void *weights;                       // with their bytes, and of what follows its numbers, in `…_size`
    const float *bias;
    const float *scales;                       // of the columns of W as bytes
    const int32_t *sums;                       // of the bytes of each column of W
    int64_t weights_size, bias_size, scales_size, sums_size;
    const float *tables[MAX_TABLES];
    int64_t table_size[MAX_TABLES];
    int32_t index[MAX_TABLES];
    int64_t table_count;
    int64_t heads, key_heads, head_size, reach;
    float scale, epsilon;
};

struct row_scale {
    float scale;
    int32_t zero;
};

struct program {
    const struct step *steps;
    const struct slot *slots;
    int64_t step_count, slot_count;
    int64_t bytes;                             // of all slots, a token
    int64_t width;                             // of the result
    int64_t rows[INDICES];                     // of the smallest table that is read by an index; INT64_MAX: no table
    int32_t result;                            // its slot, of float32
    int32_t bfloat16;                          // operands: 1: bfloat16, 0: float32
    int32_t level;                             // of `attention_level`
};

// A thread's place of work: consecutive texts and their slots.
struct group {
    const struct program *program;
    const struct forward *call;
    const int32_t *begins;                     // of its texts, from `first` on
    int64_t text, texts, first, tokens;        // first text and token of the batch
    char *memory;
};

// What a thread multiplies behind a panel of weights, so that it fetches these weights meanwhile.
struct ahead {
    const char *next;                          // its first weight; NULL: nothing
    int64_t fetched;                           // rows of weights of the panel at hand that were; set: of the next one
};

// A thread's memory for one unit at a time, and the panel of halved weights whose numbers it has; NULL: none.
struct scratch {
    void *memory;
    const void *panel;
};

struct forward {
    const struct program *program;
    const int64_t *ids, *positions, *types;    // [tokens]; types NULL: all 0
    const int32_t *begins;                     // [texts + 1]
    const int32_t *keys;                       // [texts]: leading tokens that are keys; NULL: all
    const int64_t *kept;                       // [texts]: the tokens whose result is written, one of each text; NULL: all
    int64_t texts, tokens;
    float *out;                                // [tokens, width], or where `kept` is not NULL or `pools` [texts, width]
    int64_t out_size;                          // numbers that there is room for
    float *unit;                               // as `out`, each row scaled to length 1; NULL: not computed
    int64_t unit_size;
    int32_t pools;                             // 1: the mean of each text's rows in their place; not with `kept`
    int32_t finite;                            // set if there is `unit`: whether all numbers of `out` are finite
    int32_t threads;                           // at most
    parallel_function parallel;                // NULL: on the calling thread
    int64_t waited;                            // set: nanoseconds beyond its spins that the caller waited
};

// Rows of `out`.
static inline int64_t result_rows(const struct forward *call) {
    return call->kept == NULL && !call->pools ? call->tokens : call->texts;
}

// Columns of a panel of weights: a panel has the weights of that many neighbouring columns, for one element of x after
// the other, or for one pair of elements after the other where operands are bfloat16, or for one four of bytes.
int64_t panel_width(int32_t level);

// Bits in which a level sums the products of neighbouring bytes: 32 with VNNI; 16 without, which saturate; 0 if the
// library has no products of bytes for the level.
int byte_sum_bits(int32_t level);

// Whether a program, and a call with one, read and write nothing but their own memory, for any ids.
int program_is_valid(const struct program *program);
int forward_is_valid(const struct forward *call);

// Computes `call->out`, `call->unit`, `call->finite` and `call->waited`. Returns DONE, NO_MEMORY (`out` is then incomplete), UNSUPPORTED, BAD_CALL where
// the call is not valid, or BAD_INDEX where an id, a position or a type is not a row of its tables.
int forward(struct forward *call);

// Threads of forwards in the foreground that are under way, in threads.c.
extern atomic_uint urgent;

// A forward of the calling thread begins, on `threads` threads. Returns how many the background has with those of the
// foreground, or 0 where the caller is not in the background; `forward_ends` gets both.
int forward_begins(int threads);
void forward_ends(int threads, int cores);

// A thread begins, or ends, to compute for a forward in the background. Between, `pause_background` waits while threads of
// the foreground need its core.
void background_begins(void);
void background_ends(void);
void pause_background(int cores);

enum { ROW_TILE = 64 };

// Rows that a thread takes at a time outside of linear layers: few of a small group, so that all threads have some.
static inline int64_t rows_at_a_time(const struct group *group) { return group->tokens <= ROW_TILE ? 2 : 8; }
