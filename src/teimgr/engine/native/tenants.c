// Quotas of tenants in a file that several processes map: what wire/tenants/policy.py says, with atomic operations.
//
// No lock, so that a process that is stopped or killed holds up no other. A charge that is refused by a later quota is
// taken back from the ones before; until then others may be refused, but never too much is admitted.

#include "library.h"

#include <stdatomic.h>

// Words of a tenant, as `Word` of wire/tenants/table.py.
enum { RATE = 1, BURST, DAILY, CONCURRENT, ARRIVAL = 8, REFUNDED, SPENT };
enum { ADMITTED, BY_RATE, BY_DAY, BY_CONCURRENT };
enum { DAY_SHIFT = 40 };

static const int64_t ns_per_s = 1000000000, most_tokens = (int64_t)1 << 32;

typedef _Atomic int64_t word;

// A charge, as `Receipt` of policy.py, and for how long to wait where it is refused.
struct tenant_receipt {
    int64_t tokens, rate, day, arrival_ns, refunded_ns, wait_ns;
};

static int64_t time_of(int64_t tokens, int64_t rate) { return (tokens * ns_per_s + rate - 1) / rate; }

static int is_over_concurrent(word *tenant, word *own, word *in_flight, int64_t rows, int64_t stride, int64_t tokens) {
    if (own == NULL) return 0;
    const int64_t limit = atomic_load_explicit(tenant + CONCURRENT, memory_order_relaxed);
    atomic_fetch_add(own, tokens);  // before the sum: of two at the same time one sees the other
    if (limit == 0) return 0;
    int64_t sum = 0;
    for (int64_t row = 0; row < rows; row++) sum += atomic_load(in_flight + row * stride);
    return sum > limit;
}

static int is_over_rate(word *tenant, int64_t tokens, int64_t now_ns, struct tenant_receipt *receipt) {
    const int64_t rate = atomic_load_explicit(tenant + RATE, memory_order_relaxed);
    if (rate == 0) return 0;
    const int64_t burst_ns = time_of(atomic_load_explicit(tenant + BURST, memory_order_relaxed), rate);
    receipt->refunded_ns = atomic_load(tenant + REFUNDED);
    int64_t before = atomic_load(tenant + ARRIVAL), after;
    do {
        after = greater(lesser(before, now_ns + burst_ns), now_ns) + time_of(tokens, rate);
        if (after - now_ns > burst_ns) {
            receipt->wait_ns = after - now_ns - burst_ns;
            return 1;
        }
    } while (!atomic_compare_exchange_weak(tenant + ARRIVAL, &before, after));
    receipt->rate = rate;
    receipt->arrival_ns = after;
    return 0;
}

static int is_over_day(word *tenant, int64_t tokens, int64_t day, struct tenant_receipt *receipt) {
    const int64_t daily = atomic_load_explicit(tenant + DAILY, memory_order_relaxed);
    if (daily == 0) return 0;
    int64_t before = atomic_load(tenant + SPENT), used;
    do {
        used = tokens + (before >> DAY_SHIFT == day ? before - (day << DAY_SHIFT) : 0);
        if (used > daily) return 1;
    } while (!atomic_compare_exchange_weak(tenant + SPENT, &before, (day << DAY_SHIFT) + used));
    receipt->day = day;
    return 0;
}

// `own` is NULL where the charge was made without tokens in flight.
void tenant_refund(word *tenant, word *own, const struct tenant_receipt *receipt, int64_t tokens, int64_t now_ns) {
    if (own != NULL) atomic_fetch_sub(own, receipt->tokens);
    if (tokens <= 0) return;
    if (receipt->rate != 0) {
        int64_t before = atomic_load(tenant + REFUNDED), back_ns;
        do {
            const int64_t left_ns = greater(0, receipt->arrival_ns - (before - receipt->refunded_ns) - now_ns);
            back_ns = lesser(tokens * ns_per_s / receipt->rate, left_ns);
        } while (!atomic_compare_exchange_weak(tenant + REFUNDED, &before, before + back_ns));
        atomic_fetch_sub(tenant + ARRIVAL, back_ns);
    }
    if (receipt->day != 0) {
        int64_t before = atomic_load(tenant + SPENT);
        do {
            if (before >> DAY_SHIFT != receipt->day) return;
        } while (!atomic_compare_exchange_weak(tenant + SPENT, &before, before - tokens));
    }
}

int64_t tenant_charge(
    word *tenant, word *own, word *in_flight, int64_t rows, int64_t stride,
    int64_t tokens, int64_t now_ns, int64_t day, struct tenant_receipt *receipt
) {
    memset(receipt, 0, sizeof *receipt);
    if (tokens < 0 || tokens > most_tokens) return -1;
    receipt->tokens = tokens;
    int64_t refused = ADMITTED;
    if (is_over_concurrent(tenant, own, in_flight, rows, stride, tokens)) refused = BY_CONCURRENT;
    else if (is_over_day(tenant, tokens, day, receipt)) refused = BY_DAY;
    else if (is_over_rate(tenant, tokens, now_ns, receipt)) refused = BY_RATE;
    if (refused != ADMITTED) tenant_refund(tenant, own, receipt, tokens, now_ns);
    return refused;
}
