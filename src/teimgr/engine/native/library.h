// What the parts of the library share: calls of attention, instruction sets, bfloat16.

#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// Runs `body(data)` on `threads` threads (0: as many as OpenMP would), as libgomp's GOMP_parallel does.
typedef void (*parallel_function)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

// Like `parallel_function`, on threads of the calling thread; on Linux alone.
void run_threads(void (*body)(void *), void *data, unsigned threads, unsigned flags);

// Strides are in elements; within a head the elements are contiguous. Text i has the tokens begins[i] to begins[i + 1].
struct attention {
    const void *query, *key, *value;
    void *out;                                         // [tokens, heads, head_size], the heads of a token contiguous
    int64_t out_stride;                                // of a token, in elements
    int64_t query_stride[2], key_stride[2], value_stride[2];  // of a token, of a head
    const int32_t *begins;                             // [texts + 1]
    const int32_t *keys;                               // [texts]: its leading tokens that are keys; NULL: all
    const float *slopes;                               // [heads]: scores lose slope · |i − j| (ALiBi); NULL: nothing
    int64_t texts, longest;                            // number of texts, tokens of the longest
    int64_t tokens;                                    // rows of each, those behind the last text included
    int64_t query_size, key_size, value_size, out_size;  // elements from the first on that each may touch
    int64_t slopes_size;                               // numbers in `slopes`
    int64_t heads, key_heads, head_size;               // key_heads divides heads
    int64_t reach;                                     // window, tokens to each side; -1: no window
    int32_t causal;
    int32_t bfloat16;                                  // 1: bfloat16 in and out; 0: float32
    int32_t level;                                     // of `attention_level`, or a lower one
    float scale;
    parallel_function parallel;                        // NULL: on the calling thread
};

// Instruction sets, each with those before it. On x86-64: AVX2 with FMA and F16C; AVX-VNNI, which CPUs with those behind it may lack;
// AVX-512; products of bfloat16; products of tiles of bfloat16 and of bytes. On 64-bit Arm: NEON, which each has; dot
// products of bytes; products of matrices of bfloat16 and of bytes.
#if defined(__aarch64__)
enum { BASELINE, NEON, NEON_DOT, NEON_BF16 };
enum { FIRST_OF_FORWARD = NEON, FIRST_OF_BFLOAT16 = NEON_BF16 };
#else
enum { BASELINE, AVX2, AVX_VNNI, AVX512, AVX512_BF16, AMX };
enum { FIRST_OF_FORWARD = AVX2, FIRST_OF_BFLOAT16 = AVX512_BF16 };
#endif
#if defined(__x86_64__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define HAS_AVX_VNNI  // the compiler has it
#endif
#if defined(HAS_AVX_VNNI) && defined(__linux__)
#define HAS_AMX  // the compiler has it; the kernel is asked for it
#include <immintrin.h>

enum { TILE_ROWS = 16, TILE_BYTES = 64 };  // of a tile, at most; a row of bytes is 16 elements

// What LDTILECFG reads.
struct tile_shapes {
    uint8_t palette, start_row, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

// Makes tiles 0, 1 and 4 as high as the upper 16 of `rows` rows, 2, 3 and 5 as the others, and 6 and 7 whole. The
// instruction is written out, since _tile_loadconfig tells the compiler of eight of the bytes that it reads.
static inline void shape_tiles(int rows) {
    const uint8_t upper = (uint8_t)(rows < TILE_ROWS ? rows : TILE_ROWS);
    const uint8_t lower = (uint8_t)(rows > TILE_ROWS ? rows - TILE_ROWS : TILE_ROWS);  // none: they are not used
    struct tile_shapes shapes = {.palette = 1, .rows = {upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS}};
    for (int tile = 0; tile < 8; tile++) shapes.bytes[tile] = TILE_BYTES;
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
}

// Clears the sums, tiles 0 to 3. What was stored before is in memory then: the intrinsics that load tiles do not tell the
// compiler that they read it.
static inline __attribute__((always_inline, target("amx-tile"))) void clear_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    __asm__ volatile("" ::: "memory");
}
#endif
enum { DONE, NO_MEMORY, UNSUPPORTED, BAD_INDEX, BAD_CALL };

enum { MAX_HEAD_SIZE = 1024, MAX_HEADS = 1 << 16 };

enum { ALIGNMENT = 64 };

// Bytes of struct attention, slot, step, program and forward, which Python declares too; -1 behind the last.
int64_t struct_size(int32_t which);

// Whether every size, stride and offset of a call is within what it was given; `attention_item` does not ask.
int attention_is_valid(const struct attention *call);

// The best instruction set of this CPU that the library has code for.
int attention_level(void);

#if defined(HAS_AVX_VNNI)
// Whether the CPU has AVX-VNNI.
int has_avx_vnni(void);
#endif

#if defined(HAS_AMX)
// Why this process may not use the tiles that the CPU has: errno of the kernel, or NO_PALETTE where a virtual machine hides
// their shapes. 0: it may, or the CPU has no tiles.
enum { NO_PALETTE = -1 };
int tiles_refusal(void);
#endif

// An item is a text, a key head and up to a fixed number of queries; any two may be computed at the same time.
int64_t attention_items(const struct attention *call);

// Bytes of memory, aligned to ALIGNMENT, that a thread needs for its items.
int64_t attention_scratch_bytes(const struct attention *call);

// Computes an item; the first ones are those of the last texts.
void attention_item(const struct attention *call, void *memory, int64_t i);

// out = the mean of `count` rows of `width` numbers, each `stride` bytes behind the one before.
void mean_of_rows(const char *rows, int64_t stride, int64_t count, int64_t width, float *out);

// As vectors.c says.
int scale_rows(const float *values, int64_t size, int64_t rows, int64_t stride, int64_t width, float *out);
int are_finite(const float *values, int64_t count);

// For a thread that waits for another: a moment in which its core may do something else.
static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

static inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

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
