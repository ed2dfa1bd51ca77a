// Quotas of tenants in a file that several processes map: what wire/tenants/table.py says, with atomic operations.
//
// No lock, so that a process that is stopped or killed holds up no other. A charge that is refused by a later quota is
// taken back from the ones before; until then others may be refused, but never too much is admitted.

#include "library.h"

#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

// Words of a tenant, as `Word` of wire/tenants/table.py. A refund is one change of REFUNDED, which is subtracted from
// ARRIVAL: a charge must not see half of it.
enum { RATE = 1, BURST, DAILY, CONCURRENT, SPENT = 10, ARRIVAL, REFUNDED };
enum { ADMITTED, BY_RATE, BY_DAY, BY_CONCURRENT };
enum { DAY_SHIFT = 40 };

static const int64_t ns_per_s = 1000000000, s_per_day = 86400, most_rows = 256;  // as ROWS of table.py

typedef _Atomic int64_t word;

// A charge, as `Receipt` of wire/tenants/table.py, and for how long to wait where it is refused. The first five are set by the caller:
// where the tenant's words are, and its tokens in flight in this worker's row, NULL where they are not counted, and in the
// first row, where the number of rows is, and how many words they are apart.
struct tenant_receipt {
    word *tenant, *own, *in_flight, *rows;
    int64_t stride;
    int64_t tokens, rate, day, arrival_ns, refunded_ns, wait_ns;
};

static int64_t time_of(int64_t tokens, int64_t rate) { return (tokens * ns_per_s + rate - 1) / rate; }

static int64_t nanoseconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * ns_per_s + now.tv_nsec;
}

static int is_over_concurrent(const struct tenant_receipt *receipt, int64_t tokens) {
    if (receipt->own == NULL) return 0;
    const int64_t limit = atomic_load_explicit(receipt->tenant + CONCURRENT, memory_order_relaxed);
    atomic_fetch_add(receipt->own, tokens);  // before the sum: of two at the same time one sees the other
    if (limit == 0) return 0;
    // A worker that is not among them yet sees this charge: it is counted there before it charges.
    const int64_t rows = lesser(atomic_load(receipt->rows), most_rows);
    int64_t sum = 0;
    for (int64_t row = 0; row < rows; row++) sum += atomic_load(receipt->in_flight + row * receipt->stride);
    return sum > limit;
}

static int is_over_rate(struct tenant_receipt *receipt, int64_t tokens, int64_t now_ns) {
    word *tenant = receipt->tenant;
    const int64_t rate = atomic_load_explicit(tenant + RATE, memory_order_relaxed);
    if (rate == 0) return 0;
    const int64_t burst_ns = time_of(atomic_load_explicit(tenant + BURST, memory_order_relaxed), rate);
    receipt->refunded_ns = atomic_load(tenant + REFUNDED);
    int64_t before = atomic_load(tenant + ARRIVAL), after;
    do {
        after = greater(lesser(before - receipt->refunded_ns, now_ns + burst_ns), now_ns) + time_of(tokens, rate);
        if (after - now_ns > burst_ns) {
            receipt->wait_ns = after - now_ns - burst_ns;
            return 1;
        }
    } while (!atomic_compare_exchange_weak(tenant + ARRIVAL, &before, after + receipt->refunded_ns));
    receipt->rate = rate;
    receipt->arrival_ns = after;
    return 0;
}

static int is_over_day(struct tenant_receipt *receipt, int64_t tokens, int64_t day) {
    word *tenant = receipt->tenant;
    const int64_t daily = atomic_load_explicit(tenant + DAILY, memory_order_relaxed);
    if (daily == 0) return 0;
    int64_t before = atomic_load(tenant + SPENT), used;
    do {
        if (before >> DAY_SHIFT == day + 1) day++;  // as _charged_day of wire/tenants/table.py
        used = tokens + (before >> DAY_SHIFT == day ? before - (day << DAY_SHIFT) : 0);
        if (used > daily) return 1;
    } while (!atomic_compare_exchange_weak(tenant + SPENT, &before, (day << DAY_SHIFT) + used));
    receipt->day = day;
    return 0;
}

void tenant_refund_at(struct tenant_receipt *receipt, int64_t tokens, int64_t now_ns) {
    word *tenant = receipt->tenant;
    if (receipt->own != NULL) atomic_fetch_sub(receipt->own, receipt->tokens);
    if (tokens <= 0) return;
    if (receipt->rate != 0) {
        int64_t before = atomic_load(tenant + REFUNDED), back_ns;
        do {
            const int64_t left_ns = greater(0, receipt->arrival_ns - (before - receipt->refunded_ns) - now_ns);
            back_ns = lesser(tokens * ns_per_s / receipt->rate, left_ns);
        } while (!atomic_compare_exchange_weak(tenant + REFUNDED, &before, before + back_ns));
    }
    if (receipt->day != 0) {
        int64_t before = atomic_load(tenant + SPENT), back;
        do {
            if (before >> DAY_SHIFT != receipt->day) return;
            back = lesser(tokens, before - (receipt->day << DAY_SHIFT));  // a clock may have left the day and returned
        } while (!atomic_compare_exchange_weak(tenant + SPENT, &before, before - back));
    }
}

int64_t tenant_charge_at(struct tenant_receipt *receipt, int64_t tokens, int64_t now_ns, int64_t day) {
    memset(&receipt->tokens, 0, sizeof *receipt - offsetof(struct tenant_receipt, tokens));
    if (tokens < 0 || tokens > INT32_MAX) return -1;
    receipt->tokens = tokens;
    int64_t refused = ADMITTED;
    if (is_over_concurrent(receipt, tokens)) refused = BY_CONCURRENT;
    else if (is_over_day(receipt, tokens, day)) refused = BY_DAY;
    else if (is_over_rate(receipt, tokens, now_ns)) refused = BY_RATE;
    if (refused != ADMITTED) tenant_refund_at(receipt, tokens, now_ns);
    return refused;
}

// For calls through ctypes, which take as long as their arguments do: the clock is read here, and `int` needs no
// conversion that is declared.
int tenant_charge(struct tenant_receipt *receipt, int tokens) {
    const int64_t daily = atomic_load_explicit(receipt->tenant + DAILY, memory_order_relaxed);
    const int64_t day = daily == 0 ? 0 : nanoseconds(CLOCK_REALTIME) / ns_per_s / s_per_day;
    return (int)tenant_charge_at(receipt, tokens, nanoseconds(CLOCK_MONOTONIC), day);
}

int tenant_refund(struct tenant_receipt *receipt, int tokens) {
    tenant_refund_at(receipt, tokens, nanoseconds(CLOCK_MONOTONIC));
    return 0;
}
