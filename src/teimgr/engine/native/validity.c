// Whether a call that came from Python reads and writes nothing but what it was given.
//
// Sizes in a call follow from a model's files, which may be anybody's. Each entry of the library checks its call here
// before it touches any memory: some thousand comparisons for a forward, a microsecond or two.

#include "forward.h"

enum {
    MAX_COLUMNS = 1 << 24,      // of a row
    MAX_TOKEN_BYTES = 1 << 30,  // of all slots
    MAX_STEPS = 1 << 20,
    MAX_THREADS = 1 << 16,      // twice as many are an int
    COLUMN_UNIT = 16,            // columns of rows that are computed by whole registers
};
static const int64_t MAX_STRIDE = (int64_t)1 << 31;

int64_t struct_size(int32_t which) {
    const int64_t sizes[] = {
        sizeof(struct attention), sizeof(struct slot), sizeof(struct step), sizeof(struct program), sizeof(struct forward)};
    return which < 0 || which >= (int32_t)(sizeof sizes / sizeof *sizes) ? -1 : sizes[which];
}

static inline int within(int64_t value, int64_t low, int64_t high) { return value >= low && value <= high; }

static int has_numbers(const void *numbers, int64_t given, int64_t needed) { return numbers == NULL || given >= needed; }

// Whether `begins` are those of texts of at most `longest` tokens that end within `tokens`, and `keys` are tokens of them.
static int texts_are_valid(const int32_t *begins, const int32_t *keys, int64_t texts, int64_t tokens, int64_t longest) {
    if (begins == NULL || !within(texts, 0, INT32_MAX) || !within(tokens, 0, INT32_MAX) || begins[0] < 0) return 0;
    int64_t wrong = 0;
    for (int64_t i = 0; i < texts; i++) {
        const int64_t length = (int64_t)begins[i + 1] - begins[i];
        wrong |= length < 0 || length > longest;
        if (keys != NULL) wrong |= keys[i] < 0;
    }
    return !wrong && begins[texts] <= tokens;
}

static int heads_are_valid(int64_t heads, int64_t key_heads, int64_t head_size, int64_t reach) {
    return within(heads, 1, MAX_HEADS) && within(key_heads, 1, heads) && heads % key_heads == 0 &&
           within(head_size, 1, MAX_HEAD_SIZE) && within(reach, -1, INT32_MAX);
}

static int rows_fit(const void *rows, const int64_t *stride, int64_t tokens, int64_t heads, int64_t size, int64_t given) {
    if (tokens == 0) return 1;
    if (rows == NULL || !within(stride[0], 0, MAX_STRIDE) || !within(stride[1], 0, MAX_STRIDE)) return 0;
    return (tokens - 1) * stride[0] + (heads - 1) * stride[1] + size <= given;
}

int attention_is_valid(const struct attention *call) {
    if (!heads_are_valid(call->heads, call->key_heads, call->head_size, call->reach)) return 0;
    if (!within(call->level, BASELINE, attention_level()) || !within(call->bfloat16, 0, 1)) return 0;
    if (!within(call->longest, 0, INT32_MAX)) return 0;
    if (!has_numbers(call->slopes, call->slopes_size, call->heads)) return 0;
    if (!texts_are_valid(call->begins, call->keys, call->texts, call->tokens, call->longest)) return 0;
    int64_t items;
    if (__builtin_mul_overflow(call->texts * call->key_heads, call->longest + 1, &items)) return 0;
    const int64_t out_stride[2] = {call->out_stride, call->head_size}, size = call->head_size;
    return call->out_stride >= call->heads * size &&
           rows_fit(call->query, call->query_stride, call->tokens, call->heads, size, call->query_size) &&
           rows_fit(call->key, call->key_stride, call->tokens, call->key_heads, size, call->key_size) &&
           rows_fit(call->value, call->value_stride, call->tokens, call->key_heads, size, call->value_size) &&
           rows_fit(call->out, out_stride, call->tokens, call->heads, size, call->out_size);
}

// Whether a slot has `columns` columns from `column` on, of `size` bytes each.
static int holds(const struct program *program, int32_t slot, int64_t column, int64_t columns, int64_t size) {
    return within(slot, 0, program->slot_count - 1) && within(column, 0, MAX_COLUMNS) &&
           within(columns, 1, MAX_COLUMNS) && (column + columns) * size <= program->slots[slot].stride;
}

static int operand_holds(const struct program *program, const struct operand *from, int64_t columns, int64_t size) {
    return holds(program, from->slot, from->column, columns, size) && (from->column * size) % 4 == 0;
}

// Whether a step writes `columns` columns somewhere, and only where there is room for them.
static int result_fits(const struct program *program, const struct step *step, int64_t columns) {
    const int64_t size = program->bfloat16 ? 2 : 4;
    const int has_floats = step->floats != NO_SLOT, has_operands = step->operands != NO_SLOT;
    return (has_floats || has_operands) && (!has_floats || holds(program, step->floats, 0, columns, 4)) &&
           (!has_operands || holds(program, step->operands, 0, columns, size));
}

static int linear_is_valid(const struct program *program, const struct step *step) {
    const int64_t panel = panel_width(program->level), columns = round_up(step->width, panel), inner = step->inner;
    const int is_bytes = step->scales != NULL;
    const int64_t size = is_bytes ? 1 : program->bfloat16 ? 2 : 4, weight = step->halved ? 2 : size;
    if (!within(inner, 1, MAX_COLUMNS) || step->weights == NULL || step->weights_size < columns * inner * weight) return 0;
    if (!within(step->halved, WHOLE, HALF_FLOAT16) || (step->halved && (is_bytes || program->bfloat16))) return 0;
    if (is_bytes) {
        const int64_t row = inner + (int64_t)sizeof(struct row_scale);
        if (byte_sum_bits(program->level) == 0 || inner % 4 || step->x.column != 0) return 0;
        if (step->sums == NULL || step->scales_size < columns || step->sums_size < columns) return 0;
        if (!holds(program, step->x.slot, 0, row, 1)) return 0;
    } else if ((program->bfloat16 && inner % 2) || !operand_holds(program, &step->x, inner, size)) {
        return 0;
    }
    // Columns of `with` behind the last are read up to a whole panel: there is SLACK behind the slots.
    return has_numbers(step->bias, step->bias_size, columns) && result_fits(program, step, columns) &&
           (step->with.slot == NO_SLOT || operand_holds(program, &step->with, step->width, 4));
}

static int tables_are_valid(const struct program *program, const struct step *step, int64_t least) {
    if (!within(step->table_count, least, MAX_TABLES)) return 0;
    for (int64_t i = 0; i < step->table_count; i++) {
        if (step->tables[i] == NULL || !within(step->index[i], 0, INDICES - 1)) return 0;
        const int64_t rows = program->rows[step->index[i]];
        if (rows < 0 || rows > step->table_size[i] / step->width) return 0;
    }
    return 1;
}

static int attend_is_valid(const struct program *program, const struct step *step) {
    const int64_t size = program->bfloat16 ? 2 : 4;
    if (!heads_are_valid(step->heads, step->key_heads, step->head_size, step->reach)) return 0;
    if (!has_numbers(step->bias, step->bias_size, step->heads)) return 0;
    const int64_t columns = step->heads * step->head_size, key_columns = step->key_heads * step->head_size;
    return operand_holds(program, &step->x, columns, size) && operand_holds(program, &step->with, key_columns, size) &&
           operand_holds(program, &step->third, key_columns, size) && holds(program, step->operands, 0, columns, size);
}

static int step_is_valid(const struct program *program, const struct step *step) {
    const int64_t width = step->width, groups = step->groups, size = program->bfloat16 ? 2 : 4;
    if (!within(step->activation, NO_ACTIVATION, QUICK_GELU) || !within(step->norm, LAYER_NORM, RMS_NORM)) return 0;
    if (!within(width, 1, MAX_COLUMNS) || !within(groups, 1, MAX_HEADS) || width * groups > MAX_COLUMNS) return 0;
    switch (step->kind) {
    case LINEAR: return linear_is_valid(program, step);
    case ATTEND: return attend_is_valid(program, step);
    case QUANTISE:
        return byte_sum_bits(program->level) != 0 && within(step->inner, 1, MAX_COLUMNS) && step->inner % COLUMN_UNIT == 0 &&
               operand_holds(program, &step->x, step->inner, size) &&
               holds(program, step->operands, 0, step->inner + (int64_t)sizeof(struct row_scale), 1);
    case ROTATE:
        return width % 2 == 0 && tables_are_valid(program, step, 2) && step->index[0] == POSITIONS &&
               step->index[1] == POSITIONS && operand_holds(program, &step->x, width * groups, 4) &&
               result_fits(program, step, width * groups);
    }
    if (width % COLUMN_UNIT || !has_numbers(step->bias, step->bias_size, width)) return 0;
    if (!result_fits(program, step, width * groups)) return 0;
    switch (step->kind) {
    case EMBED: return tables_are_valid(program, step, 0);
    case NORM:
        return operand_holds(program, &step->x, width * groups, 4) &&
               has_numbers(step->weights, step->weights_size, width * 4);
    case ACTIVATE: return operand_holds(program, &step->x, width, 4) && step->with.slot == NO_SLOT;
    case ADD:
        if (step->with.slot == NO_SLOT && step->bias == NULL) return 0;
        return operand_holds(program, &step->x, width, 4) &&
               (step->with.slot == NO_SLOT || operand_holds(program, &step->with, width, 4));
    case GATE: return operand_holds(program, &step->x, width, 4) && operand_holds(program, &step->with, width, 4);
    }
    return 0;
}

int program_is_valid(const struct program *program) {
    if (program->steps == NULL || program->slots == NULL) return 0;
    if (!within(program->level, FIRST_OF_FORWARD, attention_level()) || !within(program->bfloat16, 0, 1)) return 0;
    if (program->bfloat16 && program->level < FIRST_OF_BFLOAT16) return 0;
    if (!within(program->step_count, 1, MAX_STEPS) || !within(program->slot_count, 1, 3 * MAX_STEPS)) return 0;
    if (!within(program->bytes, 1, MAX_TOKEN_BYTES)) return 0;
    for (int64_t i = 0; i < program->slot_count; i++) {
        const struct slot *slot = program->slots + i;
        if (slot->offset % ALIGNMENT || slot->stride % ALIGNMENT) return 0;
        if (!within(slot->offset, 0, program->bytes) || !within(slot->stride, 1, program->bytes - slot->offset)) return 0;
    }
    for (int64_t i = 0; i < program->step_count; i++)
        if (!step_is_valid(program, program->steps + i)) return 0;
    return holds(program, program->result, 0, program->width, 4);
}

int forward_is_valid(const struct forward *call) {
    const struct program *program = call->program;
    if (program == NULL || !program_is_valid(program)) return 0;
    if (!texts_are_valid(call->begins, call->keys, call->texts, call->tokens, INT32_MAX)) return 0;
    if (call->texts < 1 || call->begins[0] != 0 || call->begins[call->texts] != call->tokens) return 0;
    for (int64_t i = 0; i < program->step_count; i++)
        if (program->steps[i].kind == ROTATE && call->positions == NULL) return 0;
    if (!within(call->pools, 0, 1) || (call->pools && call->kept != NULL)) return 0;
    for (int64_t i = 0; call->pools && i < call->texts; i++)
        if (call->begins[i + 1] == call->begins[i]) return 0;  // has no mean
    const int64_t numbers = result_rows(call) * program->width;
    if (call->unit != NULL && call->unit_size < numbers) return 0;
    return call->out != NULL && call->out_size >= numbers && within(call->threads, 0, MAX_THREADS);
}
