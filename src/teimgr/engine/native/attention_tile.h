// The arithmetic of attention.c for one instruction set, which the including file names as simd.h describes.

#include "simd.h"

#if TILES
// Products of tiles: 16 queries, 32 keys that are summed over, a head of whole tiles.
#define ROWS 16
#define MAX_SIZE MAX_TILED_HEAD
#define KEYS_AT_A_TIME 32
#else
#define ROWS 6  // queries that share a load of the keys
#define MAX_SIZE MAX_HEAD_SIZE
#define KEYS_AT_A_TIME WIDTH
#endif

#if TILES
// Tiles 0 to 3 are sums, 4 has queries or weights, and 5 to 7 have keys or values.

// Adds the products of tile 4 and `columns` tiles, 2 or 4, of rows `pitch` elements apart.
INLINE void LEVEL(add_products)(const ELEMENT *from, int64_t pitch, int columns) {
    _tile_loadd(5, from, pitch * 4);
    _tile_loadd(6, from + WIDTH, pitch * 4);
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 6);
    if (columns == 2) return;
    _tile_loadd(7, from + 2 * WIDTH, pitch * 4);
    _tile_loadd(5, from + 3 * WIDTH, pitch * 4);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 4, 5);
}

INLINE void LEVEL(store_sums)(float *to, int64_t pitch, int columns) {
    _tile_stored(0, to, pitch * 4);
    _tile_stored(1, to + WIDTH, pitch * 4);
    if (columns == 2) return;
    _tile_stored(2, to + 2 * WIDTH, pitch * 4);
    _tile_stored(3, to + 3 * WIDTH, pitch * 4);
}
#endif

INLINE const void *LEVEL(row_of)(const struct attention *call, const void *from, int64_t element) {
    return (const char *)from + element * (call->bfloat16 ? 2 : 4);
}

// The numbers of one head of one token as elements, each `stride` behind the one before.
INLINE void LEVEL(load_row)(const struct attention *call, const void *row, ELEMENT *to, int64_t stride) {
    const int64_t size = call->head_size;
#if PAIRS
    const char *from = row;
    for (int64_t e = 0; e < size / 2; e++) memcpy(to + e * stride, from + 4 * e, 4);
    if (size % 2) to[size / 2 * stride] = ((const uint16_t *)row)[size - 1];
#else
    if (call->bfloat16)
        for (int64_t e = 0; e < size; e++) to[e * stride] = from_bfloat16(((const uint16_t *)row)[e]);
    else
        for (int64_t e = 0; e < size; e++) to[e * stride] = ((const float *)row)[e];
#endif
}

#if WIDTH == 16
// Up to 16 elements of a row; 0 behind them.
INLINE __m512i LEVEL(load_elements)(const struct attention *call, const void *row, int64_t first, __mmask16 kept) {
#if !PAIRS
    if (call->bfloat16) {
        const __m256i numbers = _mm256_maskz_loadu_epi16(kept, (const uint16_t *)row + first);
        return _mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16);
    }
#endif
    (void)call;
    return _mm512_maskz_loadu_epi32(kept, (const char *)row + 4 * first);
}

// Rows of 16 elements each become columns.
INLINE void LEVEL(transpose)(__m512i rows[16]) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // b[i + k]: elements k, 4 + k, 8 + k and 12 + k of rows i to i + 3
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int k = 0; k < 4; k++) {
        const __m512i low = _mm512_shuffle_i32x4(b[k], b[4 + k], 0x88), high = _mm512_shuffle_i32x4(b[8 + k], b[12 + k], 0x88);
        const __m512i low_odd = _mm512_shuffle_i32x4(b[k], b[4 + k], 0xdd), high_odd = _mm512_shuffle_i32x4(b[8 + k], b[12 + k], 0xdd);
        rows[k] = _mm512_shuffle_i32x4(low, high, 0x88);
        rows[8 + k] = _mm512_shuffle_i32x4(low, high, 0xdd);
        rows[4 + k] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
        rows[12 + k] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
    }
}
#endif

// Keys `block` of the text → [panels of PANEL keys, elements of a head, PANEL]: scores of neighbouring keys are
// neighbours, and one sum after the other is read as one stretch of memory.
static TARGET void LEVEL(pack_keys)(
    const struct attention *call, const struct item *item, struct range block, int64_t pitch, ELEMENT *packed) {
    const int64_t elements = (call->head_size + PAIRS) / (1 + PAIRS), count = block.end - block.begin;
    const int64_t first = (item->begin + block.begin) * call->key_stride[0] + item->key_head * call->key_stride[1];
#if WIDTH == 16
    for (int64_t j = 0; j < pitch && !(PAIRS && call->head_size % 2); j += 16) {
        ELEMENT *to = packed + j / PANEL * PANEL * elements + j % PANEL;
        for (int64_t e = 0; e < elements; e += 16) {
            const int64_t columns = lesser(16, elements - e);
            const __mmask16 kept = (__mmask16)((1u << columns) - 1);
            __m512i rows[16];
            for (int64_t i = 0; i < 16; i++) {
                const void *row = LEVEL(row_of)(call, call->key, first + (j + i) * call->key_stride[0]);
                rows[i] = j + i < count ? LEVEL(load_elements)(call, row, e, kept) : _mm512_setzero_si512();
            }
            LEVEL(transpose)(rows);
            for (int64_t i = 0; i < columns; i++) _mm512_storeu_si512(to + (e + i) * PANEL, rows[i]);
        }
    }
    if (!(PAIRS && call->head_size % 2)) return;
#endif
    ELEMENT *panel = packed;
    for (int64_t j = 0; j < count; j++) {
        panel = packed + j / PANEL * PANEL * elements;
        LEVEL(load_row)(call, LEVEL(row_of)(call, call->key, first + j * call->key_stride[0]), panel + j % PANEL, PANEL);
    }
    for (int64_t e = 0; e < elements; e++)
        for (int64_t j = count; j < pitch; j++) panel[e * PANEL + j % PANEL] = 0;
}

// Values `block` of the text → [keys, or pairs of keys, up to pitch; width].
static TARGET void LEVEL(pack_values)(
    const struct attention *call, const struct item *item, struct range block, int64_t pitch, int64_t width,
    ELEMENT *packed) {
    const int64_t size = call->head_size, count = block.end - block.begin, stride = call->value_stride[0];
    const int64_t first = (item->begin + block.begin) * stride + item->key_head * call->value_stride[1];
    for (int64_t j = 0; j < pitch; j += 1 + PAIRS, packed += width) {
        const void *row = LEVEL(row_of)(call, call->value, first + lesser(j, count - 1) * stride);
#if PAIRS
        const uint16_t *one = row, *two = j + 1 < count ? one + stride : one;
        const uint32_t keep = j + 1 < count ? 0xffffffffu : j < count ? 0xffffu : 0;
        for (int64_t d = 0; d < size; d++) packed[d] = (one[d] | (uint32_t)two[d] << 16) & keep;
#else
        if (j < count)
            LEVEL(load_row)(call, row, packed, 1);
        else
            memset(packed, 0, (size_t)size * sizeof *packed);
#endif
        for (int64_t d = size; d < width; d++) packed[d] = 0;
    }
}

#if TILES
// Scores of ROWS queries with a panel of keys, or with half of it: a tile of 16 keys each.
INLINE void LEVEL(multiply_keys)(
    const ELEMENT *queries, int64_t elements, const ELEMENT *keys, int columns, float *scores, int64_t pitch) {
    clear_sums();
    for (int64_t e = 0; e < elements; e += TILE_ROWS, keys += TILE_ROWS * PANEL) {
        _tile_loadd(4, queries + e, elements * 4);
        LEVEL(add_products)(keys, PANEL, columns);
    }
    LEVEL(store_sums)(scores, pitch, columns);
}

static TARGET void LEVEL(multiply_all_keys)(
    const ELEMENT *queries, int64_t elements, const ELEMENT *packed, struct range seen, float *scores, int64_t pitch) {
    for (int64_t j = seen.begin / PANEL * PANEL; j < seen.end; j += PANEL) {
        if (seen.end - j > PANEL / 2)
            LEVEL(multiply_keys)(queries, elements, packed + j * elements, COLUMNS, scores + j, pitch);
        else
            LEVEL(multiply_keys)(queries, elements, packed + j * elements, COLUMNS / 2, scores + j, pitch);
    }
}
#else
// Products of ROWS queries with `columns` × WIDTH keys.
INLINE void LEVEL(multiply_keys)(
    const ELEMENT *queries, int64_t elements, const ELEMENT *keys, int columns, float *scores, int64_t pitch) {
    FLOATS sums[ROWS][COLUMNS] = {};
    for (int64_t e = 0; e < elements; e++)
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < columns; c++)
                sums[r][c] = LEVEL(multiply_add)(queries[r * elements + e], keys + e * PANEL + c * WIDTH, sums[r][c]);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < columns; c++) *(FLOATS *)(scores + r * pitch + c * WIDTH) = sums[r][c];
}

// Scores of ROWS queries with keys `seen` of the block.
static TARGET void LEVEL(multiply_all_keys)(
    const ELEMENT *queries, int64_t elements, const ELEMENT *packed, struct range seen, float *scores, int64_t pitch) {
    for (int64_t j = seen.begin / PANEL * PANEL; j < seen.end; j += PANEL) {
        const ELEMENT *panel = packed + j * elements;
        const int64_t left = seen.end - j;
        if (left > (COLUMNS - 1) * WIDTH)
            LEVEL(multiply_keys)(queries, elements, panel, COLUMNS, scores + j, pitch);
#if COLUMNS > 2
        else if (left > 2 * WIDTH)
            LEVEL(multiply_keys)(queries, elements, panel, 3, scores + j, pitch);
        else if (left > WIDTH)
            LEVEL(multiply_keys)(queries, elements, panel, 2, scores + j, pitch);
#endif
        else
            LEVEL(multiply_keys)(queries, elements, panel, 1, scores + j, pitch);
    }
}

#endif

// Scores of the query at `position` of the block, less `slope` for each token between it and the key: ALiBi (Press et al.,
// "Train Short, Test Long", 2022), to both sides.
static TARGET void LEVEL(subtract_distances)(float *scores, struct range all, int64_t position, float slope) {
    FLOATS distance;
    for (int i = 0; i < WIDTH; i++) distance[i] = (float)(all.begin - position + i);
    for (int64_t j = all.begin; j < all.end; j += WIDTH, distance += (float)WIDTH)
        *(FLOATS *)(scores + j) -= LEVEL(larger)(distance, -distance) * slope;
}

// Scores of one query → 2^(factor · (score - maximum)), as weights for `multiply_values`; 0 outside of `seen`. `all` is the
// range that has scores. Returns the sum; `maximum` is raised to the largest score.
static TARGET float LEVEL(exponentials)(
    float *scores, uint16_t *weights, struct range all, struct range seen, float factor, float *maximum) {
    (void)weights;
    const int64_t end = round_up(all.end, WIDTH);
    for (int64_t j = all.begin; j < seen.begin; j++) scores[j] = NOTHING;
    for (int64_t j = seen.end; j < end; j++) scores[j] = NOTHING;
    FLOATS largest = LEVEL(broadcast)(*maximum), sums = {};
    for (int64_t j = all.begin; j < end; j += WIDTH) largest = LEVEL(larger)(*(FLOATS *)(scores + j), largest);
    *maximum = LEVEL(largest_of)(largest);  // NaN among the scores is not larger than anything, and makes the sum NaN
    const float offset = *maximum * factor;
    for (int64_t j = all.begin; j < end; j += WIDTH) {
        const FLOATS x = *(FLOATS *)(scores + j);
        FLOATS weight = LEVEL(power_of_two)(x * factor - offset);
        sums += weight;
#if PAIRS
        LEVEL(store_bfloat16)(weight, weights + j);
#else
        *(FLOATS *)(scores + j) = weight;
#endif
    }
#if TILES
    if (end % KEYS_AT_A_TIME) memset(weights + end, 0, WIDTH * sizeof *weights);
#endif
    return LEVEL(sum_of)(sums);
}

#if TILES
// Sums of values, 32 or 64 elements of the head, by the weights of ROWS queries.
INLINE void LEVEL(multiply_values)(
    const ELEMENT *weights, int64_t weights_pitch, const ELEMENT *values, int64_t width, struct range pairs, int columns,
    float *out) {
    clear_sums();
    for (int64_t j = pairs.begin; j < pairs.end; j += TILE_ROWS) {
        _tile_loadd(4, weights + j, weights_pitch * 4);
        LEVEL(add_products)(values + j * width, width, columns);
    }
    LEVEL(store_sums)(out, width, columns);
}
#else
// Sums of values, `columns` × WIDTH elements of the head, by the weights of ROWS queries.
INLINE void LEVEL(multiply_values)(
    const ELEMENT *weights, int64_t weights_pitch, const ELEMENT *values, int64_t width, struct range pairs, int columns,
    float *out) {
    FLOATS sums[ROWS][COLUMNS] = {};
    for (int64_t j = pairs.begin; j < pairs.end; j++)
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < columns; c++)
                sums[r][c] =
                    LEVEL(multiply_add)(weights[r * weights_pitch + j], values + j * width + c * WIDTH, sums[r][c]);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < columns; c++) *(FLOATS *)(out + r * width + c * WIDTH) = sums[r][c];
}

#endif

static TARGET void LEVEL(multiply_all_values)(
    const ELEMENT *weights, int64_t pitch, const ELEMENT *values, int64_t width, struct range pairs, float *out) {
    int64_t d = 0;
    for (; d + COLUMNS * WIDTH <= width; d += COLUMNS * WIDTH)
        LEVEL(multiply_values)(weights, pitch, values + d, width, pairs, COLUMNS, out + d);
    for (; d + 2 * WIDTH <= width; d += 2 * WIDTH)
        LEVEL(multiply_values)(weights, pitch, values + d, width, pairs, 2, out + d);
#if !TILES
    for (; d < width; d += WIDTH) LEVEL(multiply_values)(weights, pitch, values + d, width, pairs, 1, out + d);
#endif
}

// The numbers of one head of one token, times `factor`, from element `at` of the result on.
static TARGET void LEVEL(store_row)(const struct attention *call, const float *row, float factor, int64_t at) {
    const int64_t size = call->head_size;
    int64_t d = 0;
    if (!call->bfloat16) {
        for (float *out = (float *)call->out + at; d < size; d++) out[d] = row[d] * factor;
        return;
    }
    uint16_t *out = (uint16_t *)call->out + at;
#if PAIRS
    for (; d + WIDTH <= size; d += WIDTH) LEVEL(store_bfloat16)(*(const FLOATS *)(row + d) * factor, out + d);
#endif
    for (; d < size; d++) out[d] = to_bfloat16(row[d] * factor);
}

// ROWS queries from `row` on of one head, against the keys of a block that one of them attends to. `done` is the head's
// place in the sums of earlier blocks; NULL where the text has no more than this block.
static TARGET void LEVEL(attend_rows)(
    const struct attention *call, const struct scratch *scratch, const struct item *item, struct range block,
    int64_t pitch, int64_t head, int64_t row, int64_t done) {
    const int64_t size = call->head_size, width = round_up(size, WIDTH), elements = (size + PAIRS) / (1 + PAIRS);
    const int64_t rows = lesser(ROWS, item->last - row);
    struct range seen[ROWS], all = {block.end, block.begin}, text = {block.end, block.begin};
    for (int64_t r = 0; r < rows; r++) {
        seen[r] = visible_keys(call, item, row + r);
        if (seen[r].begin >= seen[r].end) continue;
        text.begin = lesser(text.begin, seen[r].begin);
        text.end = greater(text.end, seen[r].end);
    }
    all.begin = greater(text.begin, block.begin), all.end = lesser(text.end, block.end);
    if (all.begin >= all.end) return;
    const int is_first = text.begin >= block.begin, is_last = text.end <= block.end;
    all.begin = (all.begin - block.begin) / KEYS_AT_A_TIME * KEYS_AT_A_TIME, all.end -= block.begin;

    ELEMENT *queries = scratch->queries;
    for (int64_t r = 0; r < ROWS; r++) {  // rows behind the last repeat it
        const int64_t token = item->begin + row + lesser(r, rows - 1);
        const int64_t at = token * call->query_stride[0] + head * call->query_stride[1];
        LEVEL(load_row)(call, LEVEL(row_of)(call, call->query, at), queries + r * elements, 1);
        const char *later = LEVEL(row_of)(call, call->query, at + 2 * ROWS * call->query_stride[0]);
        for (int64_t byte = 0; byte < elements * 4; byte += 64) __builtin_prefetch(later + byte);
    }
    LEVEL(multiply_all_keys)(queries, elements, scratch->keys, all, scratch->scores, pitch);

    float maximum[ROWS], sum[ROWS], before[ROWS];  // `before`: the factor of the sums of earlier blocks
    const float factor = call->scale * 1.44269504f;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = done + r;
        const float old = is_first ? NOTHING : scratch->maximum[at];
        maximum[r] = old;
        struct range here = {greater(seen[r].begin - block.begin, all.begin), lesser(seen[r].end - block.begin, all.end)};
        uint16_t *weights = (uint16_t *)scratch->weights + r * pitch;
        if (call->slopes != NULL)
            LEVEL(subtract_distances)(
                scratch->scores + r * pitch, all, row + r - block.begin, call->slopes[head] / call->scale);
        if (here.begin >= here.end) {  // no key in this block
            memset(weights, 0, (size_t)pitch * 2);
            memset(scratch->scores + r * pitch, 0, (size_t)pitch * 4);
            sum[r] = 0;
        } else {
            sum[r] = LEVEL(exponentials)(scratch->scores + r * pitch, weights, all, here, factor, &maximum[r]);
        }
        if (!is_first) {
            before[r] = LEVEL(power_of_two)(LEVEL(broadcast)((old - maximum[r]) * factor))[0];
            sum[r] += scratch->sum[at] * before[r];
        }
        if (!is_last) scratch->maximum[at] = maximum[r], scratch->sum[at] = sum[r];
    }

    float out[ROWS * MAX_SIZE];
#if PAIRS
    const struct range pairs = {all.begin / 2, (round_up(all.end, 2)) / 2};
    LEVEL(multiply_all_values)(scratch->weights, pitch / 2, scratch->values, width, pairs, out);
#else
    LEVEL(multiply_all_values)(scratch->scores, pitch, scratch->values, width, all, out);
#endif
    for (int64_t r = 0; r < rows; r++) {
        float *row_out = out + r * width, *earlier = scratch->result + (done + r) * width;
        if (!is_first)
            for (int64_t d = 0; d < size; d++) row_out[d] += earlier[d] * before[r];
        if (!is_last) {
            memcpy(earlier, row_out, (size_t)size * sizeof *out);
            continue;
        }
        const float share = sum[r] != 0 ? 1 / sum[r] : 0;
        const int64_t at = (item->begin + row + r) * call->out_stride + head * size;
        LEVEL(store_row)(call, row_out, share, at);
    }
}

// The queries of an item, against all their keys.
static TARGET void LEVEL(attend)(
    const struct attention *call, const struct scratch *scratch, const struct item *item) {
    const int64_t group = call->heads / call->key_heads;
    const struct range from = visible_keys(call, item, item->first), to = visible_keys(call, item, item->last - 1);
    if (item->keys < item->length) clear_blind_rows(call, item);
#if TILES
    shape_tiles(2 * TILE_ROWS);
#endif
    for (int64_t begin = from.begin / KEY_BLOCK * KEY_BLOCK; begin < to.end; begin += KEY_BLOCK) {
        const struct range block = {begin, lesser(begin + KEY_BLOCK, item->keys)};
        const int64_t pitch = round_up(block.end - block.begin, KEYS_AT_A_TIME);
        LEVEL(pack_keys)(call, item, block, pitch, scratch->keys);
        LEVEL(pack_values)(call, item, block, pitch, round_up(call->head_size, WIDTH), scratch->values);
        for (int64_t i = 0; i < group; i++)
            for (int64_t row = item->first; row < item->last; row += ROWS)
                LEVEL(attend_rows)(
                    call, scratch, item, block, pitch, item->key_head * group + i, row,
                    i * QUERY_CHUNK + row - item->first);
    }
#if TILES
    _tile_release();
#endif
}

#undef ROWS
#undef MAX_SIZE
#undef KEYS_AT_A_TIME
#undef TILES

#include "simd_end.h"
