// Compares each kernel of the C library with plain loops, on random shapes, in every instruction set that this CPU has.
//
// A program without Python, so that it runs where only C is at hand: under an emulator of another processor, as
// `dev.py arm` does. `compare [BEST]` ends with 1 at the first difference, or if the best level is not BEST.

#include <math.h>
#include <stdio.h>

#include "forward.h"

int pool_mean(const float *hidden, int64_t tokens, const int32_t *begins, int64_t texts, int64_t width, float *out);
int finite_rows(const float *values, int64_t rows, int64_t width, uint8_t *finite);

enum { CASES = 12, MOST_TOKENS = 200 };

static uint64_t state = 0x9e3779b97f4a7c15u;

static uint64_t next(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state * 0x2545f4914f6cdd1dull >> 16;
}

static int64_t from(int64_t low, int64_t high) { return low + (int64_t)(next() % (uint64_t)(high - low + 1)); }

static float number(void) { return (float)(next() % 20001) / 10000.0f - 1.0f; }

static float rounded(float value, int bfloat16) { return bfloat16 ? from_bfloat16(to_bfloat16(value)) : value; }

static void *memory(int64_t bytes) {
    void *got = aligned_alloc(ALIGNMENT, (size_t)round_up(bytes + 1, ALIGNMENT));
    if (got == NULL) exit(2);
    return memset(got, 0, (size_t)bytes);
}

static float *numbers(int64_t count) {
    float *made = memory(count * 4);
    for (int64_t i = 0; i < count; i++) made[i] = number();
    return made;
}

static const char *what;
static int64_t compared;

static void expect(double got, double wanted, double tolerance, int64_t at) {
    compared++;
    if (fabs(got - wanted) <= tolerance) return;
    printf("%s: number %lld is %.8g, wanted %.8g within %.2g\n", what, (long long)at, got, wanted, tolerance);
    exit(1);
}

// `begins` of up to 5 texts of `tokens` tokens; returns their number, the longest in `longest`.
static int64_t cut(int32_t *begins, int64_t tokens, int64_t *longest) {
    int64_t texts = 0, at = 0;
    for (*longest = 0, begins[0] = 0; at < tokens; texts++) {
        const int64_t length = texts == 4 ? tokens - at : from(1, tokens - at);
        *longest = greater(*longest, length);
        begins[texts + 1] = (int32_t)(at += length);
    }
    return texts;
}

static void attention_case(int32_t level, int bfloat16) {
    const int is_long = from(1, 6) == 1;  // more than a block of keys
    const int64_t tokens = is_long ? from(1025, 1300) : from(1, 100), key_heads = is_long ? 1 : from(1, 3);
    const int64_t heads = key_heads * (is_long ? 1 : from(1, 2)), limit = is_long ? 6 : 100;
    const int64_t size = from(0, 1) ? 32 * from(1, is_long ? 1 : 3) : from(1, limit);  // 32: whole tiles
    const int64_t of_queries = tokens * heads * size, of_keys = tokens * key_heads * size, bytes = bfloat16 ? 2 : 4;
    int32_t begins[6], keys[5];
    int64_t longest;
    const int64_t texts = cut(begins, tokens, &longest);
    for (int64_t i = 0; i < texts; i++) keys[i] = (int32_t)from(0, begins[i + 1] - begins[i]);
    float *wide[3] = {numbers(of_queries), numbers(of_keys), numbers(of_keys)}, *slopes = numbers(heads);
    void *narrow[3];
    for (int i = 0; i < 3; i++) {
        const int64_t count = i == 0 ? of_queries : of_keys;
        narrow[i] = memory(count * bytes);
        for (int64_t j = 0; j < count; j++) {
            wide[i][j] = rounded(wide[i][j], bfloat16);
            if (bfloat16) ((uint16_t *)narrow[i])[j] = to_bfloat16(wide[i][j]);
            else ((float *)narrow[i])[j] = wide[i][j];
        }
    }
    struct attention call = {
        .query = narrow[0], .key = narrow[1], .value = narrow[2], .out = memory(of_queries * bytes),
        .out_stride = heads * size, .query_stride = {heads * size, size}, .key_stride = {key_heads * size, size},
        .value_stride = {key_heads * size, size}, .begins = begins, .keys = from(0, 1) ? keys : NULL,
        .slopes = from(0, 2) ? NULL : slopes, .slopes_size = heads, .texts = texts, .longest = longest, .tokens = tokens,
        .query_size = of_queries, .key_size = of_keys, .value_size = of_keys, .out_size = of_queries, .heads = heads,
        .key_heads = key_heads, .head_size = size, .reach = from(0, 1) ? -1 : from(0, 40), .causal = (int32_t)from(0, 1),
        .bfloat16 = bfloat16, .level = level, .scale = 1 / sqrtf((float)size),
    };
    int attention(const struct attention *call);
    if (attention(&call) != DONE) expect(1, 0, 0, 0);
    double *scores = memory(longest * 8);
    for (int64_t text = 0; text < texts; text++)
        for (int64_t row = begins[text]; row < begins[text + 1]; row++)
            for (int64_t head = 0; head < heads; head++) {
                const int64_t of_head = head / (heads / key_heads), place = row - begins[text];
                const int64_t last = call.keys == NULL ? begins[text + 1] - begins[text] : keys[text];
                double most = -INFINITY, sum = 0;
                for (int64_t j = 0; j < last; j++) {
                    const int64_t far = llabs(place - j), key = begins[text] + j;
                    scores[j] = -INFINITY;
                    if ((call.causal && j > place) || (call.reach >= 0 && far > call.reach)) continue;
                    scores[j] = call.slopes == NULL ? 0 : -(double)slopes[head] * (double)far;
                    for (int64_t d = 0; d < size; d++)
                        scores[j] += (double)call.scale * wide[0][(row * heads + head) * size + d] *
                                     wide[1][(key * key_heads + of_head) * size + d];
                    most = fmax(most, scores[j]);
                }
                for (int64_t j = 0; j < last; j++) sum += scores[j] = scores[j] == -INFINITY ? 0 : exp(scores[j] - most);
                for (int64_t d = 0; d < size; d++) {
                    double value = 0;
                    for (int64_t j = 0; j < last && sum > 0; j++)
                        value += scores[j] / sum * wide[2][((begins[text] + j) * key_heads + of_head) * size + d];
                    const int64_t at = (row * heads + head) * size + d;
                    const float got = bfloat16 ? from_bfloat16(((uint16_t *)call.out)[at]) : ((float *)call.out)[at];
                    expect(got, value, bfloat16 ? 0.02 : 2e-5, at);
                }
            }
    free(scores), free(slopes), free(call.out);
    for (int i = 0; i < 3; i++) free(wide[i]), free(narrow[i]);
}

static double activated(double x, int32_t activation) {
    switch (activation) {
    case GELU: return 0.5 * x * (1 + erf(x / sqrt(2)));
    case GELU_TANH: return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case RELU: return fmax(x, 0);
    case SILU: return x / (1 + exp(-x));
    case TANH: return tanh(x);
    case QUICK_GELU: return x / (1 + exp(-1.702 * x));
    }
    return x;
}

// A program of an embedding and one step more, and a batch for it.
struct trial {
    struct step steps[3];
    struct slot slots[4];
    struct program program;
    struct forward call;
    int64_t ids[MOST_TOKENS], positions[MOST_TOKENS];
    int32_t begins[6];
    float *table, *out;
    int64_t columns, rows;
};

static const struct operand none = {NO_SLOT, 0};

static void start_trial(struct trial *trial, int32_t level, int bfloat16, int64_t columns) {
    memset(trial, 0, sizeof *trial);
    trial->columns = columns, trial->rows = from(1, 30);
    trial->table = numbers(trial->rows * columns);
    for (int i = 0; i < 3; i++) {
        struct step *step = trial->steps + i;
        step->x = step->with = step->third = none, step->floats = step->operands = NO_SLOT, step->groups = 1, step->scale = 1;
    }
    // Slots: the embedding as float32, as operands, the result, and bytes.
    for (int i = 0; i < 4; i++) trial->slots[i] = (struct slot){i * 8192, 8192};
    struct step *embed = trial->steps;
    embed->kind = EMBED, embed->width = columns, embed->table_count = 1, embed->tables[0] = trial->table;
    embed->table_size[0] = trial->rows * columns, embed->floats = 0, embed->operands = 1;
    const int64_t tokens = from(1, 5) == 1 ? from(1, MOST_TOKENS) : from(1, 30);
    for (int64_t i = 0; i < tokens; i++) trial->ids[i] = from(0, trial->rows - 1), trial->positions[i] = from(0, 15);
    int64_t longest;
    const int64_t texts = cut(trial->begins, tokens, &longest);
    trial->program = (struct program){
        .slots = trial->slots, .step_count = 2, .slot_count = 4, .bytes = 4 * 8192, .rows = {trial->rows, 16, INT64_MAX},
        .result = 2, .bfloat16 = bfloat16, .level = level,
    };
    trial->call = (struct forward){
        .ids = trial->ids, .positions = trial->positions, .begins = trial->begins, .texts = texts, .tokens = tokens,
    };
}

static int forward_status(struct trial *trial, int32_t threads, float *out) {
    trial->program.steps = trial->steps;
    trial->call.program = &trial->program;
    trial->call.threads = threads, trial->call.parallel = threads > 1 ? run_threads : NULL;
    trial->call.out = out, trial->call.out_size = trial->call.tokens * trial->program.width;
    return forward(&trial->call);
}

// Runs the program with `width` columns of results, on one thread and on three, which give the same bits.
static void run_trial(struct trial *trial, int64_t width) {
    trial->program.width = width;
    const int64_t bytes = trial->call.tokens * width * 4;
    float *of_three = memory(bytes);
    trial->out = memory(bytes);
    const int status = forward_status(trial, 1, trial->out) | forward_status(trial, 3, of_three);
    expect(status, DONE, 0, -1);
    expect(memcmp(trial->out, of_three, (size_t)bytes) != 0, 0, 0, -2);
    free(of_three);
}

static void end_trial(struct trial *trial) { free(trial->table), free(trial->out); }

static double embedded(const struct trial *trial, int64_t token, int64_t column) {
    return trial->table[trial->ids[token] * trial->columns + column];
}

static void linear_case(int32_t level, int bfloat16) {
    struct trial trial;
    start_trial(&trial, level, bfloat16, 16 * from(1, 12));
    const int64_t panel = panel_width(level), width = from(1, 150), padded = round_up(width, panel), pair = bfloat16 ? 2 : 1;
    const int64_t inner = trial.columns - (from(0, 3) ? 0 : 2 * from(0, 7)), per_panel = inner / pair * panel;
    const int halved = bfloat16 ? WHOLE : (int)from(WHOLE, HALF_FLOAT16);
    const int64_t weight_size = bfloat16 || halved ? 2 : 4;
    float *weights = numbers(width * inner), *bias = numbers(padded);
    char *packed = memory(padded * inner * weight_size);
    for (int64_t column = 0; column < width; column++)
        for (int64_t e = 0; e < inner; e++) {
            float *weight = weights + column * inner + e;
            const int64_t at = column / panel * per_panel * pair + (e / pair * panel + column % panel) * pair + e % pair;
            *weight = halved == HALF_FLOAT16 ? (float)(_Float16)*weight : rounded(*weight, bfloat16 || halved);
            if (halved == HALF_FLOAT16) ((_Float16 *)packed)[at] = (_Float16)*weight;
            else if (bfloat16 || halved) ((uint16_t *)packed)[at] = to_bfloat16(*weight);
            else ((float *)packed)[at] = *weight;
        }
    struct step *step = trial.steps + 1;
    step->kind = LINEAR, step->x.slot = 1, step->floats = 2, step->width = width, step->inner = inner;
    step->weights = packed, step->weights_size = padded * inner * weight_size, step->halved = halved;
    step->activation = (int32_t)from(NO_ACTIVATION, QUICK_GELU);
    if (from(0, 1)) step->bias = bias, step->bias_size = padded;
    if (width <= trial.columns && from(0, 1)) step->with.slot = 0;
    if (!bfloat16) trial.steps[0].floats = 1, trial.steps[0].operands = NO_SLOT, step->with.slot = step->with.slot == 0 ? 1 : NO_SLOT;
    run_trial(&trial, width);
    for (int64_t token = 0; token < trial.call.tokens; token++)
        for (int64_t column = 0; column < width; column++) {
            double value = step->bias == NULL ? 0 : bias[column], size = 1;
            for (int64_t e = 0; e < inner; e++) {
                const double product = (double)rounded((float)embedded(&trial, token, e), bfloat16) * weights[column * inner + e];
                value += product, size += fabs(product);
            }
            value = activated(value, step->activation);
            if (step->with.slot != NO_SLOT) value += embedded(&trial, token, column);
            expect(trial.out[token * width + column], value, size * (bfloat16 ? 2e-5 : 1e-6), token * width + column);
        }
    end_trial(&trial), free(weights), free(bias), free(packed);
}

static void bytes_case(int32_t level, int bfloat16) {
    struct trial trial;
    start_trial(&trial, level, bfloat16, 16 * from(1, 12));
    const int64_t panel = panel_width(level), width = from(1, 150), padded = round_up(width, panel), inner = trial.columns;
    const int most = byte_sum_bits(level) == 16 ? 32 : 127;
    float *scales = numbers(padded);
    int8_t *weights = memory(padded * inner), *packed = memory(padded * inner);
    int32_t *sums = memory(padded * 4);
    for (int64_t column = 0; column < width; column++)
        for (int64_t e = 0; e < inner; e++) {
            const int8_t weight = (int8_t)from(-most, most);
            weights[column * inner + e] = weight, sums[column] += weight;
            packed[column / panel * panel * inner + (e / 4 * panel + column % panel) * 4 + e % 4] = weight;
        }
    struct step *quantise = trial.steps + 1, *step = trial.steps + 2;
    quantise->kind = QUANTISE, quantise->x.slot = 1, quantise->operands = 3, quantise->inner = inner;
    quantise->width = inner + (int64_t)sizeof(struct row_scale);
    step->kind = LINEAR, step->x.slot = 3, step->floats = 2, step->width = width, step->inner = inner;
    step->weights = packed, step->weights_size = padded * inner, step->scales = scales, step->sums = sums;
    step->scales_size = step->sums_size = padded;
    trial.program.step_count = 3;
    if (!bfloat16) trial.steps[0].floats = 1, trial.steps[0].operands = NO_SLOT;
    run_trial(&trial, width);
    for (int64_t token = 0; token < trial.call.tokens; token++) {
        float low = 0, high = 0;
        for (int64_t e = 0; e < inner; e++) {
            const float x = rounded((float)embedded(&trial, token, e), bfloat16);
            low = fminf(low, x), high = fmaxf(high, x);
        }
        const float scale = high > low ? (high - low) / 255.0f : 1.0f, inverse = 1.0f / scale;
        const float zero = rintf(-low * inverse);
        for (int64_t column = 0; column < width; column++) {
            double sum = 0;
            for (int64_t e = 0; e < inner; e++) {
                const float x = rounded((float)embedded(&trial, token, e), bfloat16);
                sum += (fmin(fmax(rint((double)x * inverse + zero), 0), 255) - zero) * weights[column * inner + e];
            }
            // A number between two bytes may go to either.
            const double unit = fabs((double)scale * scales[column]);
            expect(trial.out[token * width + column], sum * scale * scales[column], unit * (2.0 * most + 0.01) + 1e-5, column);
        }
    }
    end_trial(&trial), free(scales), free(weights), free(packed), free(sums);
}

static void rows_case(int32_t level, int bfloat16) {
    static const int32_t kinds[] = {NORM, ADD, ACTIVATE, GATE, ROTATE};
    struct trial trial;
    start_trial(&trial, level, bfloat16, 16 * from(1, 12));
    struct step *step = trial.steps + 1;
    step->kind = kinds[from(0, 4)], step->x.slot = 0, step->floats = 2, step->epsilon = 1e-5f;
    step->activation = step->kind == ACTIVATE || step->kind == GATE ? (int32_t)from(NO_ACTIVATION, QUICK_GELU) : 0;
    step->norm = (int32_t)from(LAYER_NORM, RMS_NORM);
    step->groups = step->kind != ROTATE ? 1 : trial.columns % 32 == 0 ? trial.columns / 32 : trial.columns / 4;
    step->width = trial.columns / step->groups;
    if (!bfloat16) trial.steps[0].operands = NO_SLOT;
    float *weights = numbers(trial.columns), *bias = numbers(trial.columns), *cosines = numbers(16 * trial.columns);
    float *sines = numbers(16 * trial.columns);
    if (step->kind == NORM) step->weights = weights, step->weights_size = trial.columns * 4;
    if (step->kind == NORM || step->kind == ADD) step->bias = bias, step->bias_size = trial.columns;
    if (step->kind == GATE) step->with.slot = 0;
    if (step->kind == ROTATE) {
        step->table_count = 2, step->tables[0] = cosines, step->tables[1] = sines;
        step->table_size[0] = step->table_size[1] = 16 * step->width, step->index[0] = step->index[1] = POSITIONS;
    }
    run_trial(&trial, trial.columns);
    for (int64_t token = 0; token < trial.call.tokens; token++) {
        double mean = 0, squares = 0;
        for (int64_t e = 0; e < trial.columns; e++) mean += embedded(&trial, token, e) / (double)trial.columns;
        if (step->norm == RMS_NORM) mean = 0;
        for (int64_t e = 0; e < trial.columns; e++) squares += pow(embedded(&trial, token, e) - mean, 2) / (double)trial.columns;
        for (int64_t e = 0; e < trial.columns; e++) {
            const double x = embedded(&trial, token, e), gate = activated(x, step->activation);
            const int64_t half = step->width / 2, place = e % step->width, first = e - place;
            const int64_t of_table = trial.positions[token] * step->width + place;
            double value = gate;
            if (step->kind == NORM) value = (x - mean) / sqrt(squares + 1e-5) * weights[e] + bias[e];
            if (step->kind == ADD) value = x + bias[e];
            if (step->kind == GATE) value = gate * x;
            if (step->kind == ROTATE)
                value = x * cosines[of_table] + (place < half ? -embedded(&trial, token, first + place + half)
                                                              : embedded(&trial, token, first + place - half)) * sines[of_table];
            expect(trial.out[token * trial.columns + e], value, 5e-5, token * trial.columns + e);
        }
    }
    end_trial(&trial), free(weights), free(bias), free(cosines), free(sines);
}

static void vectors_case(void) {
    const int64_t rows = from(1, 40), width = from(1, 200);
    float *values = numbers(rows * width), *out = memory(rows * width * 4);
    uint8_t finite[40];
    int32_t begins[6];
    int64_t longest;
    const int64_t texts = cut(begins, rows, &longest), bad = from(0, rows - 1);
    expect(pool_mean(values, rows, begins, texts, width, out), DONE, 0, 0);
    for (int64_t text = 0; text < texts; text++)
        for (int64_t d = 0; d < width; d++) {
            double sum = 0;
            for (int64_t row = begins[text]; row < begins[text + 1]; row++) sum += values[row * width + d];
            expect(out[text * width + d], sum / (begins[text + 1] - begins[text]), 1e-6, d);
        }
    expect(scale_rows(values, rows * width, rows, width, width, out), DONE, 0, 0);
    for (int64_t row = 0; row < rows; row++) {
        double sum = 0;
        for (int64_t d = 0; d < width; d++) sum += pow(values[row * width + d], 2);
        for (int64_t d = 0; d < width; d++) expect(out[row * width + d], values[row * width + d] / sqrt(sum), 1e-6, d);
    }
    values[bad * width + from(0, width - 1)] = from(0, 1) ? NAN : INFINITY;
    expect(finite_rows(values, rows, width, finite), DONE, 0, 0);
    for (int64_t row = 0; row < rows; row++) expect(finite[row], row != bad, 0, row);
    free(values), free(out);
}

// A kernel in every level from `first` on, with operands of float32 or of bfloat16.
static void run_cases(const char *name, void (*kernel)(int32_t level, int bfloat16), int32_t first, int bfloat16) {
    static char text[64];
    for (int32_t level = first; level <= attention_level(); level++) {
        snprintf(text, sizeof text, "%s, level %d, %s", name, level, bfloat16 ? "bfloat16" : "float32");
        what = text, compared = 0;
        for (int i = 0; i < CASES; i++) kernel(level, bfloat16);
        printf("%s: %lld numbers are right\n", text, (long long)compared);
    }
}

int main(int count, char **arguments) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    const int best = attention_level();
    if (count > 1 && atoi(arguments[1]) != best) return printf("the best level is %d, not %s\n", best, arguments[1]), 1;
    for (int bfloat16 = 0; bfloat16 < 2; bfloat16++) {
        const int32_t first = bfloat16 ? FIRST_OF_BFLOAT16 : FIRST_OF_FORWARD;
        run_cases("attention", attention_case, BASELINE, bfloat16);
        run_cases("linear", linear_case, first, bfloat16);
        run_cases("rows", rows_case, first, bfloat16);
        int32_t of_bytes = first;
        while (of_bytes <= best && byte_sum_bits(of_bytes) == 0) of_bytes++;
        run_cases("bytes", bytes_case, of_bytes, bfloat16);
    }
    what = "vectors", compared = 0;
    for (int i = 0; i < CASES; i++) vectors_case();
    return printf("vectors: %lld numbers are right\n", (long long)compared), 0;
}
