// The forward of a transformer on CPUs: a program of steps, made by lowering.py, run over a packed batch.
//
// Plain C over pointers, called through ctypes. The arithmetic is in forward_tile.h, compiled once per instruction set.
// A batch is divided into groups of texts, and a thread takes a group through all steps: what it computes stays in its
// second-level cache, and no thread waits for another. Where there are too few groups, all threads share the parts of
// every step of one group. A token's result does not depend on the texts beside it: products are summed in one order.

#include "forward.h"

enum {
    GROUP_TOKENS = 128,         // of texts that a thread takes at a time
    SHARED_GROUP_TOKENS = 512,  // of texts that all threads take together
    SLACK = 256,                // bytes behind a thread's memory: a panel may be wider than what is left of a row
    FEW_GROUPS = 8,             // for each thread: more are balanced by taking them one by one
    MAX_BALANCED = 64,         // threads
    SHARING_COST = 16,          // steps that are shared take a sixteenth longer: threads wait for each other
    HELD_OF = 2,                // units of a step for each thread, of which each may hold one ahead
    SPINS = 20000,              // before a thread that waits for another offers its core
    FEW_DROPPED = 64,           // rows that are not wanted: to leave them out is not worth a second program
};

static inline int64_t ceiling(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

#if defined(__x86_64__) || defined(__aarch64__)
#include <pthread.h>
#include <sched.h>
#include <time.h>

enum {
#if defined(__aarch64__)
    ZERO_OF_BYTES = 128,  // bytes of rows are signed: SDOT and SMMLA multiply signed bytes alone
#else
    ZERO_OF_BYTES = 0,  // they are unsigned, as PMADDUBSW and VPDPBUSD want them
#endif
    MAX_ROWS = 6,       // that share a load of the weights
    FETCHED_BYTES = 8192,  // how far ahead weights are fetched from memory
    SECOND_LEVEL = 2,    // of the caches, for __builtin_prefetch
    TAKEN_AHEAD = 12,    // elements of a row of weights that are taken ahead from there
};

// A block of rows of a panel: which of how many. `ahead` is NULL in a group of more than ROW_TILE rows, whose products take longer than its weights.
// `panel` has the panel's weights, or gets them, where those of the step are halved.
struct part {
    int64_t at, count;
    struct ahead *ahead;
    void *panel;
};

// Weights that are fetched from memory while others are multiplied: from `from` on `advance` bytes for each element, and
// from element `turn` on from `next` on.
struct fetch {
    const char *from, *next;
    int64_t turn, advance;
};

// The body of a function of (step, group, unit, ahead): `multiply` takes the unit's rows in blocks of nearly equal height,
// whose number is a constant in each call, so that sums stay in registers. Units of one panel follow each other: its weights
// come from memory once for all rows of a group, or from `moved`.
#define IN_BLOCKS(multiply, moved)                                                                             \
    const int64_t tiles = (group->tokens + ROW_TILE - 1) / ROW_TILE, panel = unit / tiles;              \
    const int64_t first = unit % tiles * ROW_TILE, last = lesser(first + ROW_TILE, group->tokens);      \
    const int64_t blocks = (last - first + MAX_ROWS - 1) / MAX_ROWS;                                  \
    for (int64_t i = 0, row = first; i < blocks; i++) {                                                 \
        const int64_t rows = (last - row + blocks - i - 1) / (blocks - i);                              \
        const struct part part = {i, blocks, ahead, moved};                                             \
        switch (rows) {                                                                                 \
        case 1: multiply(step, group, row, 1, panel, &part); break;                                     \
        case 2: multiply(step, group, row, 2, panel, &part); break;                                     \
        case 3: multiply(step, group, row, 3, panel, &part); break;                                     \
        case 4: multiply(step, group, row, 4, panel, &part); break;                                     \
        case 5: multiply(step, group, row, 5, panel, &part); break;                                     \
        default: multiply(step, group, row, 6, panel, &part);                                           \
        }                                                                                               \
        row += rows;                                                                                    \
    }

#if defined(__aarch64__)
#include <arm_neon.h>
#define LEVEL(name) name##_neon
#define TARGET
#define WIDTH 4
#define COLUMNS 4
#define PAIRS 0
#define DOTS 0
#include "forward_tile.h"

#define LEVEL(name) name##_neon_dot
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#define WIDTH 4
#define COLUMNS 4
#define PAIRS 0
#define DOTS 1
#include "forward_tile.h"

#define LEVEL(name) name##_neon_bf16
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod+bf16+i8mm")))
#define WIDTH 4
#define COLUMNS 4
#define PAIRS 1
#define DOTS 1
#include "forward_tile.h"

int64_t panel_width(int32_t level) { return level >= NEON ? 16 : 0; }

int byte_sum_bits(int32_t level) { return level >= NEON_DOT ? 32 : 0; }
#else
#include <immintrin.h>
#define LEVEL(name) name##_avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#if defined(HAS_AVX_VNNI)
#define VNNI_TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))
#endif
#define WIDTH 8
#define COLUMNS 2
#define PAIRS 0
#include "forward_tile.h"

#define LEVEL(name) name##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
#define VNNI_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")))
#define WIDTH 16
#define COLUMNS 4
#define PAIRS 0
#include "forward_tile.h"

#define LEVEL(name) name##_avx512_bf16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))
#define VNNI_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma")))
#define WIDTH 16
#define COLUMNS 4
#define PAIRS 1
#include "forward_tile.h"

int64_t panel_width(int32_t level) { return level >= AVX512 ? 64 : level >= AVX2 ? 16 : 0; }

int byte_sum_bits(int32_t level) {
    const int has_vnni = attention_level() >= AVX512 && __builtin_cpu_supports("avx512vnni");
    if (level >= AVX512 && has_vnni) return 32;
#if defined(HAS_AVX_VNNI)
    if (level == AVX_VNNI && has_avx_vnni()) return 32;
#endif
    return level >= AVX2 && level <= AVX512 ? 16 : 0;
}
#endif

// What attention is asked for a group.
static struct attention attention_of(const struct step *step, const struct group *group) {
    const struct program *program = group->program;
    const int64_t size = program->bfloat16 ? 2 : 4;
    const struct operand *from[] = {&step->x, &step->with, &step->third};
    const void *rows[3];
    struct attention call = {0};
    int64_t *strides[] = {call.query_stride, call.key_stride, call.value_stride};
    for (int i = 0; i < 3; i++) {
        const struct slot *slot = program->slots + from[i]->slot;
        rows[i] = group->memory + group->tokens * slot->offset + from[i]->column * size;
        strides[i][0] = slot->stride / size, strides[i][1] = step->head_size;
    }
    const struct slot *out = program->slots + step->operands;
    call.query = rows[0], call.key = rows[1], call.value = rows[2];
    call.out = group->memory + group->tokens * out->offset, call.out_stride = out->stride / size;
    call.begins = group->begins, call.texts = group->texts;
    call.slopes = step->bias, call.slopes_size = step->bias_size;
    call.keys = group->call->keys == NULL ? NULL : group->call->keys + group->text;
    for (int64_t i = 0; i < group->texts; i++)
        call.longest = greater(call.longest, group->begins[i + 1] - group->begins[i]);
    call.heads = step->heads, call.key_heads = step->key_heads, call.head_size = step->head_size;
    call.reach = step->reach, call.causal = step->causal, call.scale = step->scale;
    call.bfloat16 = program->bfloat16, call.level = program->level;
    return call;
}

static int64_t units_of(const struct step *step, const struct group *group, const struct attention *attention) {
    switch (step->kind) {
    case LINEAR: return ceiling(step->width, panel_width(group->program->level)) * ceiling(group->tokens, ROW_TILE);
    case ATTEND: return attention_items(attention);
    }
    return ceiling(group->tokens, rows_at_a_time(group));
}

typedef void (*unit_function)(const struct step *step, const struct group *group, int64_t unit);
typedef void (*linear_function)(const struct step *step, const struct group *group, int64_t unit, struct ahead *ahead);
typedef void (*halved_function)(
    const struct step *step, const struct group *group, int64_t unit, struct ahead *ahead, struct scratch *scratch);

#if defined(__aarch64__)
static linear_function linear_of_bytes(const struct program *program, const struct step *step) {
    (void)step;
    return program->bfloat16 ? linear_bytes_neon_bf16 : linear_bytes_neon_dot;
}

static linear_function linear_of_numbers(const struct program *program, const struct step *step) {
    (void)step;
    return program->bfloat16 ? linear_neon_bf16 : program->level >= NEON_DOT ? linear_neon_dot : linear_neon;
}

static halved_function linear_of_halves(const struct program *program) {
    return program->level >= NEON_DOT ? linear_halved_neon_dot : linear_halved_neon;
}

static unit_function rows_of(const struct program *program) {
    return program->bfloat16 ? run_rows_neon_bf16 : program->level >= NEON_DOT ? run_rows_neon_dot : run_rows_neon;
}
#else
static linear_function linear_of_bytes(const struct program *program, const struct step *step) {
#if defined(HAS_AMX)
    if (program->level >= AMX && program->bfloat16 && has_whole_tiles_avx512_bf16(step)) return linear_bytes_amx_avx512_bf16;
#endif
    if (program->bfloat16) return linear_bytes_vnni_avx512_bf16;
    const int is_vnni = byte_sum_bits(program->level) == 32;
    if (program->level >= AVX512) return is_vnni ? linear_bytes_vnni_avx512 : linear_bytes_avx512;
#if defined(HAS_AVX_VNNI)
    if (is_vnni) return linear_bytes_vnni_avx2;
#endif
    return linear_bytes_avx2;
}

static linear_function linear_of_numbers(const struct program *program, const struct step *step) {
#if defined(HAS_AMX)
    if (program->level >= AMX && program->bfloat16 && has_whole_tiles_avx512_bf16(step)) return linear_amx_avx512_bf16;
#endif
    if (program->bfloat16) return linear_avx512_bf16;
    return program->level >= AVX512 ? linear_avx512 : linear_avx2;
}

static halved_function linear_of_halves(const struct program *program) {
    return program->level >= AVX512 ? linear_halved_avx512 : linear_halved_avx2;
}

static unit_function rows_of(const struct program *program) {
    if (program->bfloat16) return run_rows_avx512_bf16;
    return program->level >= AVX512 ? run_rows_avx512 : run_rows_avx2;
}
#endif

static void run_unit(
    const struct step *step, const struct group *group, const struct attention *attention, struct scratch *scratch,
    int64_t unit, struct ahead *ahead) {
    if (step->kind == ATTEND) {
        scratch->panel = NULL;
        attention_item(attention, scratch->memory, unit);
        return;
    }
    if (step->kind != LINEAR)
        rows_of(group->program)(step, group, unit);
    else if (step->scales != NULL)
        linear_of_bytes(group->program, step)(step, group, unit, ahead);
    else if (step->halved)
        linear_of_halves(group->program)(step, group, unit, ahead, scratch);
    else
        linear_of_numbers(group->program, step)(step, group, unit, ahead);
}

// A unit that a thread has taken: number `unit` of step `step`.
struct taken {
    int64_t step, unit;
};

// The first weight of a unit of a linear layer; NULL for anything else.
static const char *weights_of(const struct group *group, struct taken taken) {
    const struct program *program = group->program;
    if (taken.step < 0 || taken.step >= program->step_count) return NULL;
    const struct step *step = program->steps + taken.step;
    if (step->kind != LINEAR) return NULL;
    const int64_t columns = panel_width(program->level);
    const int64_t size = step->scales != NULL ? 1 : program->bfloat16 || step->halved ? 2 : 4;
    return (const char *)step->weights + taken.unit / ceiling(group->tokens, ROW_TILE) * columns * step->inner * size;
}

// The first linear layer from `step` on, or else the number of steps.
static int64_t linear_from(const struct program *program, int64_t step) {
    while (step < program->step_count && program->steps[step].kind != LINEAR) step++;
    return step;
}

// Writes a group's result to its place in the batch: its rows, or the mean of each text's.
static void copy_result(const struct group *group) {
    const struct program *program = group->program;
    const struct slot *slot = program->slots + program->result;
    const char *rows = group->memory + group->tokens * slot->offset;
    const int64_t width = program->width;
    float *out = group->call->out + (group->call->pools ? group->text : group->first) * width;
    if (group->call->pools)
        for (int64_t i = 0; i < group->texts; i++) {
            const int64_t begin = group->begins[i], count = group->begins[i + 1] - begin;
            mean_of_rows(rows + begin * slot->stride, slot->stride, count, width, out + i * width);
        }
    else
        for (int64_t row = 0; row < group->tokens; row++)
            memcpy(out + row * width, rows + row * slot->stride, (size_t)width * sizeof(float));
}

// Makes `group` the texts from its end on, up to `tokens` tokens but at least one text; 0 where none is left.
static int next_group(struct group *group, int64_t tokens) {
    const struct forward *call = group->call;
    group->text += group->texts;
    group->first += group->tokens;
    group->texts = 0;
    if (group->text >= call->texts) return 0;
    const int32_t *begins = call->begins + group->text;
    do group->texts++;
    while (group->text + group->texts < call->texts && begins[group->texts + 1] - begins[0] <= tokens);
    group->tokens = begins[group->texts] - begins[0];
    return 1;
}

// Whether a unit of a step works in a thread's scratch.
static int uses_scratch(const struct step *step, const struct group *group) {
    return step->kind == ATTEND || (step->kind == LINEAR && step->halved && group->tokens > MAX_ROWS);
}

static int64_t scratch_bytes(const struct group *group) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < group->program->step_count; i++) {
        const struct step *step = group->program->steps + i;
        if (!uses_scratch(step, group)) continue;
        if (step->kind == LINEAR) {
            bytes = greater(bytes, step->inner * panel_width(group->program->level) * 4);
            continue;
        }
        const struct attention attention = attention_of(step, group);
        bytes = greater(bytes, attention_scratch_bytes(&attention));
    }
    return round_up(bytes, ALIGNMENT);
}

// The progress of the threads that share a step.
struct progress {
    _Alignas(64) atomic_llong next, done;
};

struct work {
    const struct forward *call;
    const struct group *groups;
    int64_t group_count, longest;     // number of groups, tokens of the largest
    int64_t texts;                    // of the group with most of them, which may have no tokens
    int64_t scratch;                  // bytes of attention's memory
    struct progress *progress;        // of every step, where threads share them
    pthread_t caller;
    int cores;                        // of a forward in the background, which gives way; else 0
    int64_t waited, ended;            // nanoseconds that the caller waited for others, and when it had no more to do
    atomic_llong next;                // the group to take next
    atomic_int status;
};

static char *new_memory(struct work *work, int64_t bytes) {
    char *memory = aligned_alloc(ALIGNMENT, (size_t)round_up(bytes + SLACK, ALIGNMENT));
    if (memory == NULL) atomic_store(&work->status, NO_MEMORY);
    return memory;
}

// Begins of a group's texts, from its first token on.
static void set_begins(struct group *group, int32_t *begins) {
    const int32_t *from = group->call->begins + group->text;
    for (int64_t i = 0; i <= group->texts; i++) begins[i] = from[i] - from[0];
    group->begins = begins;
}

// Between two units, where a forward in the background waits for others.
static inline void give_way(const struct work *work) {
    if (work->cores && atomic_load_explicit(&urgent, memory_order_relaxed)) pause_background(work->cores);
}

// Takes groups, the largest first, until none is left, each through all steps.
static void take_all_groups(struct work *work) {
    const struct program *program = work->call->program;
    const int64_t slots = round_up(work->longest * program->bytes, ALIGNMENT);
    char *memory = NULL;
    for (;;) {
        const int64_t i = atomic_fetch_add_explicit(&work->next, 1, memory_order_relaxed);
        if (i >= work->group_count) break;
        if (memory == NULL && (memory = new_memory(work, slots + work->scratch + (work->texts + 1) * 4)) == NULL) return;
        struct group group = work->groups[work->group_count - 1 - i];
        group.memory = memory;
        set_begins(&group, (int32_t *)(memory + slots + work->scratch));
        const int is_small = group.tokens <= ROW_TILE;
        struct ahead ahead = {NULL, 0};
        struct scratch scratch = {memory + slots, NULL};
        for (int64_t s = 0; s < program->step_count; s++) {
            const struct step *step = program->steps + s;
            const struct attention attention = step->kind == ATTEND ? attention_of(step, &group) : (struct attention){0};
            const int64_t units = units_of(step, &group, &attention);
            for (int64_t unit = 0; unit < units; unit++) {
                give_way(work);
                const struct taken further = {linear_from(program, s + 1), 0};
                if (is_small) ahead.next = weights_of(&group, unit + 1 < units ? (struct taken){s, unit + 1} : further);
                run_unit(step, &group, &attention, &scratch, unit, is_small ? &ahead : NULL);
            }
        }
        copy_result(&group);
    }
    free(memory);
}

static void take_groups(void *data) {
    struct work *work = data;
    if (work->cores) background_begins();
    take_all_groups(work);
    if (work->cores) background_ends();
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

// Waits until `units` units are done; returns the nanoseconds that it took beyond SPINS.
static int64_t wait_for(const struct work *work, atomic_llong *done, int64_t units) {
    int64_t began = 0;
    for (int64_t i = 0; atomic_load_explicit(done, memory_order_acquire) < units; i++) {
        if (i == SPINS) began = now();
        if (i < SPINS) {
            pause_briefly();
            continue;
        }
        give_way(work);
        sched_yield();
    }
    return began == 0 ? 0 : now() - began;
}

static int64_t take_unit(struct progress *progress) {
    return atomic_fetch_add_explicit(&progress->next, 1, memory_order_relaxed);
}

// The first unit that is left of the linear layer behind step `from`, taken if it has `least` units; else of step -1.
static struct taken first_of_next(struct work *work, int64_t from, int64_t least) {
    const struct group *group = work->groups;
    const struct program *program = group->program;
    struct taken found = {linear_from(program, from + 1), 0};
    if (found.step < program->step_count) {
        if (units_of(program->steps + found.step, group, NULL) >= least)
            found.unit = take_unit(work->progress + found.step);
        else
            found.step = -1;
    }
    return found;
}

// Takes parts of the steps of the only group, in order. A thread that comes late finds the first steps done: how many
// threads there are need not be known.
static void share_all_steps(struct work *work) {
    const struct group *group = work->groups;
    const struct program *program = group->program;
    const int is_small = group->tokens <= ROW_TILE;
    // A thread takes a unit before it has computed the last one: it fetches its weights meanwhile, and has neighbouring
    // rows. Not of steps with so few units that another thread would have none.
    const int64_t least = HELD_OF * (int64_t)work->call->threads;
    struct taken further = {-1, 0};  // of a linear layer to come
    struct ahead ahead = {NULL, 0};
    struct scratch scratch = {NULL, NULL};
    int64_t waited = 0;
    for (int64_t s = 0; s < program->step_count; s++) {
        const struct step *step = program->steps + s;
        struct progress *progress = work->progress + s;
        const struct attention attention = step->kind == ATTEND ? attention_of(step, group) : (struct attention){0};
        const int64_t units = units_of(step, group, &attention);
        int64_t unit = further.step == s ? further.unit : take_unit(progress);
        const int holds = units >= least, fetches = is_small && step->kind == LINEAR;
        while (unit < units) {
            int64_t next = holds ? take_unit(progress) : units;
            if (fetches) {
                if (next >= units && further.step <= s) further = first_of_next(work, s, least);
                ahead.next = weights_of(group, next < units ? (struct taken){s, next} : further);
            }
            give_way(work);
            const int needs = uses_scratch(step, group);
            if (needs && scratch.memory == NULL) scratch.memory = new_memory(work, work->scratch);
            if (!needs || scratch.memory != NULL)
                run_unit(step, group, &attention, &scratch, unit, fetches ? &ahead : NULL);
            atomic_fetch_add_explicit(&progress->done, 1, memory_order_release);
            unit = holds ? next : take_unit(progress);
        }
        waited += wait_for(work, &progress->done, units);
    }
    free(scratch.memory);
    if (pthread_equal(pthread_self(), work->caller)) work->waited += waited, work->ended = now();
}

static void share_steps(void *data) {
    struct work *work = data;
    if (work->cores) background_begins();
    share_all_steps(work);
    if (work->cores) background_ends();
}

static void run_shared(struct work *work, struct group *group) {
    const struct program *program = group->program;
    const int64_t slots = round_up(group->tokens * program->bytes, ALIGNMENT);
    const int64_t progress = program->step_count * (int64_t)sizeof(struct progress);
    if ((group->memory = new_memory(work, slots + progress + (group->texts + 1) * 4)) == NULL) return;
    work->progress = (struct progress *)(group->memory + slots);
    memset(work->progress, 0, (size_t)progress);
    set_begins(group, (int32_t *)(group->memory + slots + progress));
    work->groups = group;
    work->scratch = scratch_bytes(group);
    work->call->parallel(share_steps, work, (unsigned)work->call->threads, 0);
    work->waited += now() - work->ended;
    if (atomic_load(&work->status) == DONE) copy_result(group);
    free(group->memory);
}

// Whether every id, position and type is a row of each table that it selects from: else foreign memory would be read.
static int indices_are_valid(const struct forward *call) {
    const int64_t *indices[INDICES] = {call->ids, call->positions, call->types};
    for (int i = 0; i < INDICES; i++) {
        const int64_t rows = call->program->rows[i];
        int64_t outside = indices[i] == NULL && rows < 1;
        if (indices[i] != NULL && rows != INT64_MAX)
            for (int64_t token = 0; token < call->tokens; token++) outside |= (uint64_t)indices[i][token] >= (uint64_t)rows;
        if (outside) return 0;
    }
    int64_t outside = 0;
    for (int64_t i = 0; call->kept != NULL && i < call->texts; i++)
        outside |= (uint64_t)call->kept[i] >= (uint64_t)call->tokens;
    return !outside;
}

// How many of the smallest groups all threads had better share step by step, once each has taken its part of the others:
// of five equal groups one thread of two would have three. Groups are in ascending order of their tokens.
static int64_t shared_groups(const struct group *groups, int64_t count, int64_t threads) {
    if (count > FEW_GROUPS * threads || threads > MAX_BALANCED) return 0;
    int64_t best = 0, best_cost = INT64_MAX, shared_tokens = 0;
    for (int64_t shared = 0; shared < threads && shared < count; shared++) {
        int64_t loads[MAX_BALANCED] = {0}, most = 0;
        for (int64_t i = count - 1; i >= shared; i--) {
            int64_t least = 0;
            for (int64_t thread = 1; thread < threads; thread++)
                if (loads[thread] < loads[least]) least = thread;
            most = greater(most, loads[least] += groups[i].tokens);
        }
        const int64_t cost = most * threads + shared_tokens + shared_tokens / SHARING_COST;
        if (cost < best_cost) best = shared, best_cost = cost;
        shared_tokens += groups[shared].tokens;
    }
    return best;
}

// A call that is valid, for all of its tokens.
static int run_all(struct forward *call) {
    const struct program *program = call->program;
    struct group *groups = malloc((size_t)call->texts * sizeof *groups), group = {.program = program, .call = call};
    if (groups == NULL) return NO_MEMORY;
    const int threads = call->parallel == NULL ? 1 : (int)greater(call->threads, 1), cores = forward_begins(threads);
    struct work work = {.call = call, .caller = pthread_self(), .cores = cores};
    while (next_group(&group, GROUP_TOKENS)) {
        work.longest = greater(work.longest, group.tokens);
        work.texts = greater(work.texts, group.texts);
        groups[work.group_count++] = group;
    }
    const int is_alone = call->parallel == NULL || call->threads < 2;
    if (is_alone || (work.group_count >= 2 * call->threads && work.longest * call->threads <= call->tokens)) {
        const int64_t shared = is_alone ? 0 : shared_groups(groups, work.group_count, call->threads);
        work.groups = groups + shared;
        work.group_count -= shared;
        int32_t begins[2] = {0, (int32_t)work.longest};  // the largest group as one text: no text needs more
        struct group largest = {.program = program, .call = call, .begins = begins, .texts = 1, .tokens = work.longest};
        work.scratch = scratch_bytes(&largest);
        if (call->parallel == NULL || (is_alone && cores == 0))
            take_groups(&work);
        else
            call->parallel(take_groups, &work, (unsigned)threads, 0);
        for (int64_t i = 0; i < shared && atomic_load(&work.status) == DONE; i++) run_shared(&work, groups + i);
    } else {
        group = (struct group){.program = program, .call = call};
        while (atomic_load(&work.status) == DONE && next_group(&group, SHARED_GROUP_TOKENS)) run_shared(&work, &group);
    }
    free(groups);
    forward_ends(threads, cores);
    call->waited = cores ? 0 : work.waited;  // where it waits by intention
    return atomic_load(&work.status);
}

static int writes(const struct step *step, int32_t slot) { return step->floats == slot || step->operands == slot; }

// Whether the steps behind step `at` compute each row from that row of its result, as float32, alone.
static int is_narrow(const struct program *program, int64_t at) {
    const struct step *steps = program->steps;
    if (steps[at].floats == NO_SLOT || steps[at].groups != 1 || steps[at].width % 16) return 0;
    for (int64_t i = at + 1; i < program->step_count; i++) {
        if (steps[i].kind == EMBED || steps[i].kind == ROTATE) return 0;
        const int32_t reads[] = {steps[i].x.slot, steps[i].with.slot, steps[i].third.slot};
        for (int r = 0; r < 3; r++) {
            int64_t from = at;
            while (reads[r] != NO_SLOT && from < i && !writes(steps + from, reads[r])) from++;
            if (from == i) return 0;
        }
    }
    return 1;
}

// The first step behind all attention that is narrow; the last step where no other is.
static int64_t narrow_step(const struct program *program) {
    int64_t at = program->step_count - 1;
    while (at > 0 && program->steps[at - 1].kind != ATTEND) at--;
    while (at < program->step_count - 1 && !is_narrow(program, at)) at++;
    return at;
}

// The steps from `at` on, for `rows` of the result of that step, float32 [texts, its width].
static int run_narrow(struct forward *call, int64_t at, const float *rows) {
    const struct program *program = call->program;
    const struct step *step = program->steps + at;
    const int64_t texts = call->texts, count = program->step_count - at;
    struct step *steps = malloc((size_t)count * sizeof *steps);
    int64_t *ids = malloc((size_t)texts * sizeof *ids);
    int32_t *begins = malloc((size_t)(texts + 1) * sizeof *begins);
    int status = NO_MEMORY;
    if (steps != NULL && ids != NULL && begins != NULL) {
        memcpy(steps, step, (size_t)count * sizeof *steps);
        steps[0] = (struct step){
            .kind = EMBED, .x = {NO_SLOT, 0}, .with = {NO_SLOT, 0}, .third = {NO_SLOT, 0}, .floats = step->floats,
            .operands = step->operands, .width = step->width, .groups = 1, .tables = {rows},
            .table_size = {texts * step->width}, .index = {IDS}, .table_count = 1, .scale = 1.0f};
        for (int64_t i = 0; i < texts; i++) ids[i] = begins[i] = (int32_t)i;
        begins[texts] = (int32_t)texts;
        struct program own = *program;
        own.steps = steps, own.step_count = count;
        struct forward behind = *call;
        behind.program = &own, behind.ids = ids, behind.begins = begins, behind.tokens = texts;
        behind.positions = behind.types = behind.kept = NULL, behind.keys = NULL;
        status = run_all(&behind);
        call->waited += behind.waited;
    }
    free(steps), free(ids), free(begins);
    return status;
}

// As `run_all`, of one row of each text: behind the last attention no other is computed. A row's result is the same, as it
// depends on none beside it.
static int run_kept(struct forward *call) {
    const struct program *program = call->program;
    const int64_t last = program->step_count - 1;
    const int64_t at = call->tokens - call->texts < FEW_DROPPED ? last : narrow_step(program);
    struct program own = *program;
    if (at < last) own.step_count = at + 1, own.result = program->steps[at].floats, own.width = program->steps[at].width;
    const size_t width = (size_t)own.width, row = width * sizeof(float);
    float *states = malloc((size_t)call->tokens * row), *rows = at < last ? malloc((size_t)call->texts * row) : call->out;
    int status = NO_MEMORY;
    if (states != NULL && rows != NULL) {
        struct forward all = *call;
        all.program = &own, all.out = states, all.kept = NULL;
        status = run_all(&all);
        call->waited = all.waited;
        for (int64_t i = 0; status == DONE && i < call->texts; i++)
            memcpy(rows + (size_t)i * width, states + (size_t)call->kept[i] * width, row);
        if (status == DONE && at < last) status = run_narrow(call, at, rows);
    }
    free(states);
    if (at < last) free(rows);
    return status;
}

int forward(struct forward *call) {
    const struct program *program = call->program;
    if (program == NULL) return BAD_CALL;
    if (panel_width(program->level) == 0 || (program->bfloat16 && program->level < FIRST_OF_BFLOAT16)) return UNSUPPORTED;
    if (!forward_is_valid(call)) return BAD_CALL;
    if (!indices_are_valid(call)) return BAD_INDEX;
    const int status = call->kept == NULL ? run_all(call) : run_kept(call);
    if (status != DONE || call->unit == NULL) return status;
    const int64_t rows = result_rows(call), width = program->width;
    call->finite = are_finite(call->out, rows * width);
    return scale_rows(call->out, rows * width, rows, width, width, call->unit);
}
#else
int64_t panel_width(int32_t level) { return (void)level, 0; }
int byte_sum_bits(int32_t level) { return (void)level, 0; }
int forward(struct forward *call) { return (void)call, UNSUPPORTED; }
#endif
