// Linear layers by Intel's AMX (Software Developer's Manual, volume 1, chapter 18): a tile has up to 16 rows of 64 bytes, and
// TDPBF16PS or TDPBUSD adds the products of two of them to a third. Included by forward_tile.h; 16 columns of 16 elements
// of a panel are a tile as they lie there.

#define AMX_TARGET                                                                                                    \
    __attribute__((target(                                                                                            \
        "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma,amx-tile,amx-bf16,amx-int8")))
#define INLINE_AMX static inline __attribute__((always_inline)) AMX_TARGET

// The intrinsics are statements, whose tiles are literals.
#define ADD_PRODUCTS(sums, x, weights)            \
    do {                                          \
        if (are_bytes)                            \
            _tile_dpbusd(sums, x, weights);       \
        else                                      \
            _tile_dpbf16ps(sums, x, weights);     \
    } while (0)

// Sets sums[r][0] and sums[r][1] to the products of the rows that the tiles are shaped for, of 64 · `steps` bytes that lie
// `stride` bytes apart, and two registers of a panel's columns; int32 where `are_bytes`.
INLINE_AMX void LEVEL(multiply_by_tiles)(
    const char *x, int64_t stride, int has_lower, const char *weights, int64_t steps, int are_bytes, FLOATS (*sums)[COLUMNS]) {
    clear_sums();
    for (int64_t step = 0; step < steps; step++, x += TILE_BYTES, weights += TILE_ROWS * PANEL * 4) {
        _tile_loadd(4, x, stride);
        _tile_loadd(6, weights, PANEL * 4);
        _tile_loadd(7, weights + TILE_BYTES, PANEL * 4);
        ADD_PRODUCTS(0, 4, 6);
        ADD_PRODUCTS(1, 4, 7);
        if (!has_lower) continue;
        _tile_loadd(5, x + TILE_ROWS * stride, stride);
        ADD_PRODUCTS(2, 5, 6);
        ADD_PRODUCTS(3, 5, 7);
    }
    _tile_stored(0, sums[0], sizeof *sums);
    _tile_stored(1, sums[0] + 1, sizeof *sums);
    if (!has_lower) return;
    _tile_stored(2, sums[TILE_ROWS], sizeof *sums);
    _tile_stored(3, sums[TILE_ROWS] + 1, sizeof *sums);
}

// A panel of columns of up to ROW_TILE rows, 32 rows and half a panel at a time: two tiles of rows by two of weights.
INLINE_AMX void LEVEL(linear_by_tiles)(const struct step *step, const struct group *group, int64_t unit, int are_bytes) {
    const int64_t tiles = (group->tokens + ROW_TILE - 1) / ROW_TILE, panel = unit / tiles;
    const int64_t first = unit % tiles * ROW_TILE, rows = lesser(ROW_TILE, group->tokens - first);
    const int64_t row_bytes = step->inner * (are_bytes ? 1 : 2), stride = group->program->slots[step->x.slot].stride;
    const char *weights = (const char *)step->weights + panel * row_bytes * PANEL;
    const char *x = LEVEL(row)(group, step->x.slot, first) + step->x.column * 2;  // bytes have column 0
    _Alignas(ALIGNMENT) FLOATS sums[ROW_TILE][COLUMNS];
    int shaped = 0;
    for (int64_t row = 0; row < rows; row += 2 * TILE_ROWS) {
        const int height = (int)lesser(2 * TILE_ROWS, rows - row);
        if (height != shaped) shape_tiles(height), shaped = height;
        for (int half = 0; half < 2; half++)
            LEVEL(multiply_by_tiles)(
                x + row * stride, stride, height > TILE_ROWS, weights + half * 2 * TILE_BYTES, row_bytes / TILE_BYTES,
                are_bytes, (FLOATS(*)[COLUMNS])&sums[row][2 * half]);
    }
    _tile_release();
    for (int64_t row = 0; are_bytes && row < rows; row++)
        LEVEL(scale_sums)(step, x + row * stride, panel * PANEL, (INTS *)sums[row], sums[row]);
    LEVEL(finish)(step, group, first, (int)rows, panel * PANEL, sums);
}

// Whether a layer's rows are whole tiles; others are multiplied without them.
static int LEVEL(has_whole_tiles)(const struct step *step) {
    return step->inner * (step->scales == NULL ? 2 : 1) % TILE_BYTES == 0;
}

static AMX_TARGET void LEVEL(linear_amx)(
    const struct step *step, const struct group *group, int64_t unit, struct ahead *ahead) {
    (void)ahead;
    LEVEL(linear_by_tiles)(step, group, unit, 0);
}

static AMX_TARGET void LEVEL(linear_bytes_amx)(
    const struct step *step, const struct group *group, int64_t unit, struct ahead *ahead) {
    (void)ahead;
    LEVEL(linear_by_tiles)(step, group, unit, 1);
}

#undef ADD_PRODUCTS
#undef INLINE_AMX
#undef AMX_TARGET
