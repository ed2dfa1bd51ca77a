// The arithmetic of forward.c for one instruction set, which the including file names as simd.h describes.

#include "simd.h"

#if PAIRS
typedef uint16_t LEVEL(operand);
#else
typedef float LEVEL(operand);
#endif
#define OPERAND LEVEL(operand)

INLINE FLOATS LEVEL(load)(const float *from) { return *(const FLOATS *)from; }

INLINE void LEVEL(store)(FLOATS value, float *floats, OPERAND *operands, int64_t column) {
    if (floats != NULL) *(FLOATS *)(floats + column) = value;
#if PAIRS
    if (operands != NULL) LEVEL(store_bfloat16)(value, operands + column);
#else
    if (operands != NULL) *(FLOATS *)(operands + column) = value;
#endif
}

INLINE void LEVEL(store_one)(float value, float *floats, OPERAND *operands, int64_t column) {
    if (floats != NULL) floats[column] = value;
#if PAIRS
    if (operands != NULL) operands[column] = to_bfloat16(value);
#else
    if (operands != NULL) operands[column] = value;
#endif
}

INLINE FLOATS LEVEL(absolute)(FLOATS x) { return (FLOATS)((INTS)x & 0x7fffffff); }

// e^-x for x ≥ 0
INLINE FLOATS LEVEL(exponential)(FLOATS x) { return LEVEL(power_of_two)(x * -1.44269504f); }

// 1 / (1 + e^-x)
INLINE FLOATS LEVEL(sigmoid)(FLOATS x) {
    const FLOATS small = LEVEL(exponential)(LEVEL(absolute)(x)), share = 1.0f / (1.0f + small);
    const INTS negative = x < 0;
    return (FLOATS)((negative & (INTS)(small * share)) | (~negative & (INTS)share));
}

// x Φ(x), with Abramowitz and Stegun's 7.1.26 for the error function: its error is below 1.5e-7.
INLINE FLOATS LEVEL(gelu)(FLOATS x) {
    const FLOATS z = LEVEL(absolute)(x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * z);
    FLOATS p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const FLOATS tail = 0.5f * p * t * LEVEL(exponential)(z * z);  // 1 − Φ(|x|)
    const INTS negative = x < 0;
    return x * (FLOATS)((negative & (INTS)tail) | (~negative & (INTS)(1.0f - tail)));
}

INLINE FLOATS LEVEL(activated)(FLOATS x, int32_t activation) {
    switch (activation) {
    case GELU: return LEVEL(gelu)(x);
    case GELU_TANH: return x * LEVEL(sigmoid)(1.59576912f * (x + 0.044715f * x * x * x));
    case RELU: return (FLOATS)((INTS)x & ~(x < 0));  // NaN stays
    case SILU: return x * LEVEL(sigmoid)(x);
    case TANH: return 2.0f * LEVEL(sigmoid)(2.0f * x) - 1.0f;
    case QUICK_GELU: return x * LEVEL(sigmoid)(1.702f * x);  // CLIP's
    }
    return x;
}

INLINE char *LEVEL(row)(const struct group *group, int32_t slot, int64_t row) {
    const struct slot *place = group->program->slots + slot;
    return group->memory + group->tokens * place->offset + row * place->stride;
}

INLINE float *LEVEL(floats_of)(const struct group *group, int32_t slot, int64_t row) {
    return slot == NO_SLOT ? NULL : (float *)LEVEL(row)(group, slot, row);
}

INLINE OPERAND *LEVEL(operands_of)(const struct group *group, int32_t slot, int64_t row) {
    return slot == NO_SLOT ? NULL : (OPERAND *)LEVEL(row)(group, slot, row);
}

// Completes a block of a linear layer's results from `column` on: bias, `activation`, the sum with `with`. It is called
// with constants, so that nothing is decided within the loops.
INLINE void LEVEL(finish_as)(
    const struct step *step, const struct group *group, int64_t row, int rows, int64_t column, FLOATS (*sums)[COLUMNS],
    int32_t activation, int32_t floats, int32_t operands, int32_t with) {
    FLOATS bias[COLUMNS];
    for (int c = 0; c < COLUMNS; c++)
        bias[c] = step->bias == NULL ? (FLOATS){} : LEVEL(load)(step->bias + column + c * WIDTH);
    for (int r = 0; r < rows; r++) {
        float *wide = LEVEL(floats_of)(group, floats, row + r);
        OPERAND *narrow = LEVEL(operands_of)(group, operands, row + r);
        const float *added = with == NO_SLOT ? NULL : LEVEL(floats_of)(group, with, row + r) + step->with.column + column;
        for (int c = 0; c < COLUMNS; c++) {
            FLOATS result = LEVEL(activated)(sums[r][c] + bias[c], activation);
            if (added != NULL) result += LEVEL(load)(added + c * WIDTH);
            LEVEL(store)(result, wide, narrow, column + c * WIDTH);
        }
    }
}

#define FINISH_ARGUMENTS                                                                                                      \
    const struct step *step, const struct group *group, int64_t row, int rows, int64_t column, FLOATS (*sums)[COLUMNS]

// What takes long in itself is code that is there once, for all heights of a block.
static __attribute__((noinline)) TARGET void LEVEL(finish_gelu)(FINISH_ARGUMENTS, int32_t floats, int32_t operands) {
    if (floats == NO_SLOT)
        LEVEL(finish_as)(step, group, row, rows, column, sums, GELU, NO_SLOT, operands, NO_SLOT);
    else
        LEVEL(finish_as)(step, group, row, rows, column, sums, GELU, floats, operands, NO_SLOT);
}

static __attribute__((noinline)) TARGET void LEVEL(finish_any)(FINISH_ARGUMENTS) {
    LEVEL(finish_as)(step, group, row, rows, column, sums, step->activation, step->floats, step->operands, step->with.slot);
}

// As `finish_as` by the step. The sums of layers without an activation stay in registers.
INLINE void LEVEL(finish)(FINISH_ARGUMENTS) {
    const int32_t floats = step->floats, operands = step->operands, with = step->with.slot;
    if (step->activation == GELU && with == NO_SLOT)
        LEVEL(finish_gelu)(step, group, row, rows, column, sums, floats, operands);
    else if (step->activation != NO_ACTIVATION)
        LEVEL(finish_any)(step, group, row, rows, column, sums);
    else if (PAIRS && floats == NO_SLOT && with == NO_SLOT)
        LEVEL(finish_as)(step, group, row, rows, column, sums, NO_ACTIVATION, NO_SLOT, operands, NO_SLOT);
    else if (operands == NO_SLOT && with == NO_SLOT)
        LEVEL(finish_as)(step, group, row, rows, column, sums, NO_ACTIVATION, floats, NO_SLOT, NO_SLOT);
    else if (operands == NO_SLOT)
        LEVEL(finish_as)(step, group, row, rows, column, sums, NO_ACTIVATION, floats, NO_SLOT, with);
    else
        LEVEL(finish_any)(step, group, row, rows, column, sums);
}

// Reads the weights of a panel that are needed `elements` later, 64 bytes for each line of the cache: the processor's own
// prefetching begins again with every page and every panel.
#define LINES (PANEL * 4 / 64)  // of the cache, in a row of a panel
#define HALF_LINES ((LINES + 1) / 2)
#define FETCHED_AHEAD (FETCHED_BYTES / (PANEL * 4))
INLINE void LEVEL(fetch_ahead)(const void *weights, int elements) {
    const char *ahead = (const char *)weights + elements * PANEL * 4;
    for (int byte = 0; byte < PANEL * 4; byte += 64) __builtin_prefetch(ahead + byte);
}

#if PAIRS && defined(__aarch64__)
#include "tiles_neon.h"
#endif

// Adds the products of `rows` rows and a panel of weights to sums of 0, and fetches `lines` lines of the cache for each
// element from memory: into the second level, since the buffers of the first are few and hold what is taken from there.
// float32 needs its speed: bfloat16 has twice the work for the same bytes.
INLINE void LEVEL(add_products)(
    const ELEMENT *weights, int64_t elements, const ELEMENT *const *x, int rows, int lines, struct fetch fetch,
    FLOATS (*sums)[COLUMNS]) {
#if PAIRS && defined(__aarch64__)
    (void)fetch;
    LEVEL(multiply_tiles)(weights, elements, x, rows, lines == LINES, 0, sums);
#else
    for (int64_t e = 0; e < elements; e++, weights += PANEL) {
        if (lines > 0) {
            if (e == fetch.turn) fetch.from = fetch.next;
            for (int line = 0; line < lines; line++) __builtin_prefetch(fetch.from + line * 64, 0, SECOND_LEVEL);
            fetch.from += fetch.advance;
        }
        if (lines < LINES && !PAIRS) LEVEL(fetch_ahead)(weights, TAKEN_AHEAD);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < COLUMNS; c++) sums[r][c] = LEVEL(multiply_add)(x[r][e], weights + c * WIDTH, sums[r][c]);
    }
#endif
}

// What a block of rows of a panel fetches: an even share of the weights that the blocks of all panels need, from those
// behind the ones that earlier blocks have fetched. `bytes` are those of a panel's weights for one element.
INLINE struct fetch LEVEL(fetch_of)(const char *weights, int64_t elements, int64_t bytes, const struct part *part) {
    const int64_t lead = FETCHED_BYTES / bytes, fetched = lesser(part->ahead->fetched, elements);
    const char *next = part->ahead->next == NULL ? weights : part->ahead->next;
    if (part->at > 0) {
        const int64_t begin = lead + (part->at - 1) * elements / part->count;
        return (struct fetch){next + begin * bytes, next, elements, bytes / part->count};
    }
    const int64_t begin = greater(lead, fetched), needed = elements + lead - begin;
    return (struct fetch){weights + begin * bytes, next, (elements - begin) * elements / needed, bytes * needed / elements};
}

// `rows` rows times one panel.
INLINE void LEVEL(multiply_panel)(
    const struct step *step, const struct group *group, int64_t row, int rows, int64_t panel, const struct part *part) {
    const int64_t elements = step->inner / (1 + PAIRS);
    const ELEMENT *own = (const ELEMENT *)step->weights + panel * elements * PANEL, *x[MAX_ROWS];
    const ELEMENT *weights = part->panel == NULL ? own : part->panel;
    FLOATS sums[MAX_ROWS][COLUMNS];
    for (int r = 0; r < rows; r++) {
        x[r] = (const ELEMENT *)(LEVEL(operands_of)(group, step->x.slot, row + r) + step->x.column);
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = (FLOATS){};
    }
    struct fetch fetch = {(const char *)(weights + FETCHED_BYTES / 4), NULL, elements, PANEL * 4};
    if (part->ahead != NULL) fetch = LEVEL(fetch_of)((const char *)weights, elements, PANEL * (part->panel == NULL ? 4 : 2), part);
    if (part->ahead == NULL && part->at > 0)
        LEVEL(add_products)(weights, elements, x, rows, 0, fetch, sums);
    else if (fetch.advance <= HALF_LINES * 64)
        LEVEL(add_products)(weights, elements, x, rows, HALF_LINES, fetch, sums);
    else
        LEVEL(add_products)(weights, elements, x, rows, LINES, fetch, sums);
    LEVEL(finish)(step, group, row, rows, panel * PANEL, sums);
}

// A panel of columns of up to ROW_TILE rows, in blocks of nearly equal height.
static TARGET void LEVEL(linear)(const struct step *step, const struct group *group, int64_t unit, struct ahead *ahead) {
#if PAIRS && defined(__aarch64__)
    ahead = NULL;  // products of matrices fetch the panel at hand alone
#endif
    IN_BLOCKS(LEVEL(multiply_panel), NULL)
    if (ahead == NULL) return;
    const int64_t elements = step->inner / (1 + PAIRS);
    ahead->fetched = FETCHED_AHEAD + (blocks - 1) * elements / blocks;
}

#if !PAIRS
// WIDTH weights of 16 bits: their numbers.
INLINE FLOATS LEVEL(widened)(const uint16_t *from, int32_t halved) {
#if defined(__aarch64__)
    if (halved == HALF_FLOAT16) return (FLOATS)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
    return (FLOATS)vshll_n_u16(vld1_u16(from), 16);
#elif WIDTH == 16
    const __m256i halves = _mm256_loadu_si256((const __m256i *)from);
    if (halved == HALF_FLOAT16) return (FLOATS)_mm512_cvtph_ps(halves);
    return (FLOATS)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#else
    const __m128i halves = _mm_loadu_si128((const __m128i *)from);
    if (halved == HALF_FLOAT16) return (FLOATS)_mm256_cvtph_ps(halves);
    return (FLOATS)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
#endif
}

// As `multiply_panel`, of weights that are halved; sums are added in the same order. The first block of rows makes their
// numbers, and leaves them for those behind it: few rows wait for weights from memory, and these are half as many bytes.
INLINE void LEVEL(multiply_halved)(
    const struct step *step, const struct group *group, int64_t row, int rows, int64_t panel, const struct part *part,
    int32_t halved) {
    if (part->at > 0) {
        LEVEL(multiply_panel)(step, group, row, rows, panel, part);
        return;
    }
    const int64_t elements = step->inner;
    const uint16_t *weights = (const uint16_t *)step->weights + panel * elements * PANEL;
    float *wide = part->panel;
    const float *x[MAX_ROWS];
    FLOATS sums[MAX_ROWS][COLUMNS];
    for (int r = 0; r < rows; r++) {
        x[r] = LEVEL(operands_of)(group, step->x.slot, row + r) + step->x.column;
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = (FLOATS){};
    }
    struct fetch fetch = {(const char *)weights + FETCHED_BYTES, NULL, elements, PANEL * 2};
    if (part->ahead != NULL) fetch = LEVEL(fetch_of)((const char *)weights, elements, PANEL * 2, part);
    for (int64_t e = 0; e < elements; e++, weights += PANEL) {
        if (e == fetch.turn) fetch.from = fetch.next;
        for (int line = 0; line < HALF_LINES; line++) __builtin_prefetch(fetch.from + line * 64, 0, SECOND_LEVEL);
        fetch.from += fetch.advance;
        for (int byte = 0; byte < PANEL * 2; byte += 64)
            __builtin_prefetch((const char *)(weights + 2 * TAKEN_AHEAD * PANEL) + byte);
        FLOATS numbers[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) numbers[c] = LEVEL(widened)(weights + c * WIDTH, halved);
        if (wide != NULL)
            for (int c = 0; c < COLUMNS; c++) *(FLOATS *)(wide + e * PANEL + c * WIDTH) = numbers[c];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < COLUMNS; c++) sums[r][c] += x[r][e] * numbers[c];
    }
    LEVEL(finish)(step, group, row, rows, panel * PANEL, sums);
}

INLINE void LEVEL(multiply_bfloat16)(
    const struct step *step, const struct group *group, int64_t row, int rows, int64_t panel, const struct part *part) {
    LEVEL(multiply_halved)(step, group, row, rows, panel, part, HALF_BFLOAT16);
}

INLINE void LEVEL(multiply_float16)(
    const struct step *step, const struct group *group, int64_t row, int rows, int64_t panel, const struct part *part) {
    LEVEL(multiply_halved)(step, group, row, rows, panel, part, HALF_FLOAT16);
}

static TARGET void LEVEL(linear_bfloat16)(
    const struct step *step, const struct group *group, int64_t unit, struct ahead *ahead, float *wide) {
    IN_BLOCKS(LEVEL(multiply_bfloat16), wide)
}

static TARGET void LEVEL(linear_float16)(
    const struct step *step, const struct group *group, int64_t unit, struct ahead *ahead, float *wide) {
    IN_BLOCKS(LEVEL(multiply_float16), wide)
}

static TARGET void LEVEL(linear_widened)(
    const struct step *step, const struct group *group, int64_t unit, struct ahead *ahead, float *wide) {
    IN_BLOCKS(LEVEL(multiply_panel), wide)
}

// As `linear`, of weights that are halved. The numbers of a panel are in `scratch` for the next rows of the group.
static TARGET void LEVEL(linear_halved)(
    const struct step *step, const struct group *group, int64_t unit, struct ahead *ahead, struct scratch *scratch) {
    const int64_t tiles = (group->tokens + ROW_TILE - 1) / ROW_TILE, elements = step->inner;
    const uint16_t *weights = (const uint16_t *)step->weights + unit / tiles * elements * PANEL;
    float *wide = group->tokens > MAX_ROWS ? scratch->memory : NULL;
    if (wide != NULL && scratch->panel == weights)
        LEVEL(linear_widened)(step, group, unit, ahead, wide);
    else
        (step->halved == HALF_FLOAT16 ? LEVEL(linear_float16) : LEVEL(linear_bfloat16))(step, group, unit, ahead, wide);
    scratch->panel = wide == NULL ? NULL : weights;
    if (ahead == NULL) return;
    const int64_t blocks = (group->tokens + MAX_ROWS - 1) / MAX_ROWS;  // a group with `ahead` has one tile
    ahead->fetched = FETCHED_BYTES / (PANEL * 2) + (blocks - 1) * elements / blocks;
}
#endif

// The sums of products of a row of bytes and a panel, whose columns begin with `column`, as numbers.
INLINE void LEVEL(scale_sums)(const struct step *step, const char *bytes, int64_t column, const INTS *sums, FLOATS *results) {
    const struct row_scale *of_row = (const struct row_scale *)(bytes + step->inner);
    for (int c = 0; c < COLUMNS; c++, column += WIDTH) {
        const UINTS whole = (UINTS)sums[c] - *(const UINTS *)(step->sums + column) * (uint32_t)of_row->zero;
        const FLOATS scales = LEVEL(load)(step->scales + column) * of_row->scale;
        results[c] = __builtin_convertvector((INTS)whole, FLOATS) * scales;
    }
}

// Products of bytes: on Arm by dot products, where there are any; else without VNNI where bfloat16 does not imply it, and
// with VNNI where the including file names a target that has it.
#if defined(__aarch64__)
#if DOTS
#define VNNI 0
#define BYTES(name) LEVEL(name##_bytes)
#define BYTES_TARGET TARGET
#include "bytes_tile.h"
#endif
#else
#if !PAIRS
#define VNNI 0
#define BYTES(name) LEVEL(name##_bytes)
#define BYTES_TARGET TARGET
#include "bytes_tile.h"
#endif
#if defined(VNNI_TARGET)
#define VNNI 1
#define BYTES(name) LEVEL(name##_bytes_vnni)
#define BYTES_TARGET VNNI_TARGET
#include "bytes_tile.h"
#endif
#endif

#if PAIRS && defined(HAS_AMX)
#include "tiles_amx.h"
#endif

INLINE FLOATS LEVEL(load_operands)(const OPERAND *from) {
#if PAIRS
    return LEVEL(load_bfloat16)(from);
#else
    return LEVEL(load)(from);
#endif
}

// The nearest integers, from 0 to 255, less ZERO_OF_BYTES, as bytes; 0 for NaN.
INLINE void LEVEL(store_bytes)(FLOATS values, char *bytes) {
#if defined(__aarch64__)
    const int16x4_t words = vqmovn_s32(vcvtnq_s32_f32((float32x4_t)values));
    const uint8x8_t whole = veor_u8(vqmovun_s16(vcombine_s16(words, words)), vdup_n_u8(ZERO_OF_BYTES));
    vst1_lane_u32((uint32_t *)bytes, vreinterpret_u32_u8(whole), 0);
#elif WIDTH == 16
    const __m512i whole = _mm512_max_epi32(_mm512_cvtps_epi32((__m512)values), _mm512_setzero_si512());
    _mm_storeu_si128((__m128i *)bytes, _mm512_cvtusepi32_epi8(whole));
#else
    const __m256i whole = _mm256_cvtps_epi32((__m256)values);
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64((__m128i *)bytes, _mm_packus_epi16(words, words));
#endif
}

static TARGET void LEVEL(quantise)(const struct step *step, const struct group *group, int64_t row) {
    const OPERAND *x = LEVEL(operands_of)(group, step->x.slot, row) + step->x.column;
    char *bytes = LEVEL(row)(group, step->operands, row);
    FLOATS most = {}, least = {};  // `least` with its sign turned
    FLOATS nothing = {};  // NaN if the row has a number that is not finite, which a maximum does not show
    for (int64_t column = 0; column < step->inner; column += WIDTH) {
        const FLOATS values = LEVEL(load_operands)(x + column);
        most = LEVEL(larger)(values, most);
        least = LEVEL(larger)(-values, least);
        nothing += values * 0.0f;
    }
    const float low = -LEVEL(largest_of)(least), range = LEVEL(largest_of)(most) - low;
    const float scale = range > 1e-30f ? range / 255.0f : 1.0f, inverse = 1.0f / scale;  // less has no finite inverse
    const int32_t zero = range < __builtin_inff() ? (int32_t)__builtin_rintf(-low * inverse) : 0;
    struct row_scale of_row = {scale + LEVEL(sum_of)(nothing), zero - ZERO_OF_BYTES};
    for (int64_t column = 0; column < step->inner; column += WIDTH)
        LEVEL(store_bytes)(LEVEL(load_operands)(x + column) * inverse + (float)zero, bytes + column);
    memcpy(bytes + step->inner, &of_row, sizeof of_row);
}

static TARGET void LEVEL(embed)(const struct step *step, const struct group *group, int64_t row) {
    const struct forward *call = group->call;
    const int64_t *indices[] = {call->ids, call->positions, call->types}, token = group->first + row;
    const float *tables[MAX_TABLES];
    for (int64_t i = 0; i < step->table_count; i++) {
        const int64_t *from = indices[step->index[i]];
        tables[i] = step->tables[i] + (from == NULL ? 0 : from[token]) * step->width;
    }
    float *floats = LEVEL(floats_of)(group, step->floats, row);
    OPERAND *operands = LEVEL(operands_of)(group, step->operands, row);
    for (int64_t column = 0; column < step->width; column += WIDTH) {
        FLOATS sum = step->bias == NULL ? (FLOATS){} : LEVEL(load)(step->bias + column);
        for (int64_t i = 0; i < step->table_count; i++) sum += LEVEL(load)(tables[i] + column);
        LEVEL(store)(sum * step->scale, floats, operands, column);
    }
}

static TARGET void LEVEL(normalise)(const struct step *step, const struct group *group, int64_t row) {
    const float *weights = step->weights;
    for (int64_t part = 0; part < step->groups; part++) {
        const int64_t at = part * step->width;
        const float *x = LEVEL(floats_of)(group, step->x.slot, row) + step->x.column + at;
        float *floats = LEVEL(floats_of)(group, step->floats, row);
        OPERAND *operands = LEVEL(operands_of)(group, step->operands, row);
        FLOATS sums = {}, squares = {};
        float mean = 0;
        if (step->norm == LAYER_NORM) {
            for (int64_t column = 0; column < step->width; column += WIDTH) sums += LEVEL(load)(x + column);
            mean = LEVEL(sum_of)(sums) / (float)step->width;
        }
        for (int64_t column = 0; column < step->width; column += WIDTH) {
            const FLOATS difference = LEVEL(load)(x + column) - mean;
            squares += difference * difference;
        }
        const float scale = 1.0f / __builtin_sqrtf(LEVEL(sum_of)(squares) / (float)step->width + step->epsilon);
        for (int64_t column = 0; column < step->width; column += WIDTH) {
            FLOATS result = (LEVEL(load)(x + column) - mean) * scale;
            if (weights != NULL) result *= LEVEL(load)(weights + column);
            if (step->bias != NULL) result += LEVEL(load)(step->bias + column);
            LEVEL(store)(result, floats, operands, at + column);
        }
    }
}

static TARGET void LEVEL(combine)(const struct step *step, const struct group *group, int64_t row) {
    const float *x = LEVEL(floats_of)(group, step->x.slot, row) + step->x.column;
    const float *with = LEVEL(floats_of)(group, step->with.slot, row);
    if (with != NULL) with += step->with.column;
    float *floats = LEVEL(floats_of)(group, step->floats, row);
    OPERAND *operands = LEVEL(operands_of)(group, step->operands, row);
    for (int64_t column = 0; column < step->width; column += WIDTH) {
        FLOATS result = LEVEL(activated)(LEVEL(load)(x + column), step->activation);
        if (step->kind == GATE) result *= LEVEL(load)(with + column);
        if (step->kind == ADD) result += LEVEL(load)((with == NULL ? step->bias : with) + column);
        LEVEL(store)(result, floats, operands, column);
    }
}

static TARGET void LEVEL(rotate)(const struct step *step, const struct group *group, int64_t row) {
    const int64_t half = step->width / 2, position = group->call->positions[group->first + row];
    const float *cosines = step->tables[0] + position * step->width, *sines = step->tables[1] + position * step->width;
    float *floats = LEVEL(floats_of)(group, step->floats, row);
    OPERAND *operands = LEVEL(operands_of)(group, step->operands, row);
    for (int64_t part = 0; part < step->groups; part++) {
        const int64_t at = part * step->width;
        const float *x = LEVEL(floats_of)(group, step->x.slot, row) + step->x.column + at;
        int64_t column = 0;
        for (; column + WIDTH <= half && half % WIDTH == 0; column += WIDTH) {
            const FLOATS low = LEVEL(load)(x + column), high = LEVEL(load)(x + half + column);
            const FLOATS first = low * LEVEL(load)(cosines + column) - high * LEVEL(load)(sines + column);
            const FLOATS second = high * LEVEL(load)(cosines + half + column) + low * LEVEL(load)(sines + half + column);
            LEVEL(store)(first, floats, operands, at + column);
            LEVEL(store)(second, floats, operands, at + half + column);
        }
        for (; column < half; column++) {  // heads that are narrower than a register
            const float low = x[column], high = x[half + column];
            const float first = low * cosines[column] - high * sines[column];
            const float second = high * cosines[half + column] + low * sines[half + column];
            LEVEL(store_one)(first, floats, operands, at + column);
            LEVEL(store_one)(second, floats, operands, at + half + column);
        }
    }
}

static TARGET void LEVEL(run_rows)(const struct step *step, const struct group *group, int64_t unit) {
    const int64_t first = unit * rows_at_a_time(group), last = lesser(first + rows_at_a_time(group), group->tokens);
    for (int64_t row = first; row < last; row++) switch (step->kind) {
        case EMBED: LEVEL(embed)(step, group, row); break;
        case NORM: LEVEL(normalise)(step, group, row); break;
        case ROTATE: LEVEL(rotate)(step, group, row); break;
        case QUANTISE: LEVEL(quantise)(step, group, row); break;
        default: LEVEL(combine)(step, group, row);
    }
}

#undef OPERAND
#undef DOTS
#undef LINES
#undef HALF_LINES
#undef FETCHED_AHEAD
#include "simd_end.h"
