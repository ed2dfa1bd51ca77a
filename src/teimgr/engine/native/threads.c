// Threads that help a calling thread, in place of OpenMP's: each caller has its own, asleep between two calls.
//
// Linux tends to wake a thread on the CPU of the one that wakes it, where it would wait until that is done: a query after
// a pause had one thread of two. So helpers are kept off the CPU that their caller runs on. And a caller waits for
// helpers that have begun, not for those still asleep.
//
// Forwards of threads that work in the background give way to those of others: a query has its cores at once, not when the
// scheduler takes them from a bulk batch. Helpers alone compute them, with less priority than their caller: it also runs
// Python, and while the scheduler keeps a thread waiting that has the GIL, all others wait for it.

#define _GNU_SOURCE

#include <stdatomic.h>

#include "library.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    SHARE = 4,  // times what it has computed since is the longest pause of a background thread, so that a fifth is left to it
    PAUSE_NS = 100000000,
    MAX_HELPERS = 255,
    NICENESS = 6,  // of helpers in the background; Linux divides a core by 1.25 for each step: one part to four
    SPINS = 2000,  // of a caller, before it sleeps until its helpers are done
    TOLD_APART = 32,  // the helpers that can be woken one by one; those behind them wake together
};

struct team {
    unsigned helpers;
    int in_background;          // where the caller does not compute
    unsigned placed;            // the first ones, which may run on `cpus` alone
    cpu_set_t cpus;
    struct helper {
        struct team *team;
        pthread_t thread;
    } members[MAX_HELPERS];
    void (*body)(void *);
    void *data;
    _Alignas(64) atomic_uint call;  // number of the last call; helpers sleep while it stays
    _Alignas(64) atomic_uint places;  // helpers that may still begin, of the first `woken`
    atomic_uint woken;
    atomic_uint done, stops, sleeps;  // helpers that have ended; the team ends; the caller sleeps
};

// Threads of forwards under way: `urgent` of those in the foreground, `background` of others but for those that pause.
atomic_uint urgent;
static atomic_int background, pausing;
static _Thread_local int in_background;
static _Thread_local int64_t resumed;  // when this thread last went on

static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};

static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Thread_local struct team *mine;

// A forked process has none of the threads that were counted, and no helpers.
static void forget_threads(void) {
    atomic_store(&urgent, 0);
    atomic_store(&background, 0);
    atomic_store(&pausing, 0);
    in_background = 0;
    if (mine == NULL) return;
    pthread_setspecific(key, NULL);
    free(mine);
    mine = NULL;
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_threads); }

static void futex_wait(atomic_uint *word, unsigned value, unsigned bits) {
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET_PRIVATE, value, NULL, NULL, bits);
}

// Wakes up to `count` threads that wait with one of `bits`.
static void futex_wake(atomic_uint *word, unsigned count, unsigned bits) {
    syscall(SYS_futex, word, FUTEX_WAKE_BITSET_PRIVATE, count, NULL, NULL, bits);
}

static int64_t nanoseconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

// Forwards of the calling thread are those of the background from now on, or not.
void set_background(int32_t is_background) { in_background = is_background; }

int forward_begins(int threads) {
    cpu_set_t cpus;
    if (in_background) return sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 0;
    atomic_fetch_add(&urgent, (unsigned)threads);
    return 0;
}

static void wake_pausing(void) {
    if (atomic_load(&pausing)) futex_wake(&urgent, INT32_MAX, ~0u);
}

void forward_ends(int threads, int cores) {
    if (cores == 0 && !in_background) atomic_fetch_sub(&urgent, (unsigned)threads);
    wake_pausing();
}

void background_begins(void) { atomic_fetch_add(&background, 1); }

void background_ends(void) {
    atomic_fetch_sub(&background, 1);
    wake_pausing();
}

// Waits until `others` threads and the urgent ones are no more than `cores`, at most until `end`.
static void pause_until(int cores, int others, int64_t end) {
    atomic_fetch_add(&pausing, 1);
    for (unsigned now; (now = atomic_load(&urgent)) != 0;) {
        const int64_t left = end - nanoseconds();
        if (left <= 0 || (int)now + others * (atomic_load(&background) + 1) <= cores) break;
        const struct timespec most = {left / 1000000000LL, left % 1000000000LL};
        syscall(SYS_futex, &urgent, FUTEX_WAIT_PRIVATE, now, &most, NULL, 0);
    }
    atomic_fetch_sub(&pausing, 1);
}

void pause_background(int cores) {
    if ((int)atomic_load(&urgent) + atomic_load(&background) <= cores) return;
    const int64_t now = nanoseconds();
    atomic_fetch_sub(&background, 1);
    pause_until(cores, 1, now + lesser(SHARE * (now - resumed), PAUSE_NS));
    atomic_fetch_add(&background, 1);
    resumed = nanoseconds();
}

// How long this thread, if it is not in the background, may still wait for the foreground, in nanoseconds.
static _Thread_local int64_t may_wait_ns;

void set_wait(int64_t most_ns) { may_wait_ns = most_ns; }

// Waits, between steps that are not a forward of this library, until none of the foreground is under way, for as long as
// this thread may: in the background as within a forward.
void wait_for_foreground(void) {
    if (atomic_load(&urgent) == 0) return;
    const int64_t began = nanoseconds();
    const int64_t most = in_background ? lesser(SHARE * (began - resumed), PAUSE_NS) : may_wait_ns;
    if (most <= 0) return;
    pause_until(0, 0, began + most);
    resumed = nanoseconds();
    may_wait_ns -= resumed - began;
}

// The bits of the first `helpers` of a team: one for each of them.
static unsigned bits_of(unsigned helpers) { return helpers < TOLD_APART ? (1u << helpers) - 1 : ~0u; }

// Runs the body of the present call, unless it is for other helpers, as many as it wants have begun, or it has ended.
static void help(struct team *team, unsigned number) {
    unsigned places = atomic_load_explicit(&team->places, memory_order_acquire);
    do {
        if (places == 0 || number >= atomic_load_explicit(&team->woken, memory_order_relaxed)) return;
    } while (!atomic_compare_exchange_weak_explicit(&team->places, &places, places - 1, memory_order_acquire, memory_order_acquire));
    team->body(team->data);
    atomic_fetch_add(&team->done, 1);
    if (atomic_load(&team->sleeps)) futex_wake(&team->done, 1, ~0u);
}

// Of the calling thread.
static void lower_priority(void) { setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + NICENESS); }

static void *run_helper(void *data) {
    const struct helper *own = data;
    struct team *team = own->team;
    if (team->in_background) lower_priority();
    const unsigned number = (unsigned)(own - team->members), bit = 1u << lesser(number, TOLD_APART - 1);
    unsigned seen = 0;
    for (;;) {
        const unsigned call = atomic_load_explicit(&team->call, memory_order_acquire);
        if (call == seen) {
            futex_wait(&team->call, seen, bit);
            continue;
        }
        if (atomic_load(&team->stops)) return NULL;
        seen = call;
        help(team, number);
    }
}

// Ends the helpers of a caller that ends.
static void end_team(void *data) {
    struct team *team = data;
    mine = NULL;  // a destructor that runs later may call again
    atomic_store(&team->stops, 1);
    atomic_fetch_add(&team->call, 1);
    futex_wake(&team->call, MAX_HELPERS, ~0u);
    for (unsigned i = 0; i < team->helpers; i++) pthread_join(team->members[i].thread, NULL);
    free(team);
}

static void make_key(void) { pthread_key_create(&key, end_team); }

// The caller's team with that many helpers, or fewer where threads cannot be had; NULL if memory is exhausted.
static struct team *team_of(unsigned helpers) {
    if (mine == NULL) {
        pthread_once(&once, make_key);
        struct team *team = aligned_alloc(ALIGNMENT, (size_t)round_up(sizeof *team, ALIGNMENT));
        if (team == NULL) return NULL;
        memset(team, 0, sizeof *team);
        team->in_background = in_background;
        if (pthread_setspecific(key, team) != 0) {
            free(team);
            return NULL;
        }
        mine = team;
    }
    if (mine->helpers < helpers) {
        sigset_t blocked, former;
        sigfillset(&blocked);  // signals are for the threads of the program, but those of faults for handlers that report them
        for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&blocked, faults[i]);
        pthread_sigmask(SIG_SETMASK, &blocked, &former);
        while (mine->helpers < helpers) {
            struct helper *helper = mine->members + mine->helpers;
            helper->team = mine;
            if (pthread_create(&helper->thread, NULL, run_helper, helper) != 0) break;
            pthread_setname_np(helper->thread, mine->in_background ? "teimgr-bulk" : "teimgr-helper");
            mine->helpers++;
        }
        pthread_sigmask(SIG_SETMASK, &former, NULL);
    }
    return mine;
}

// Lets the first `count` helpers run where the caller may, but not on its CPU while it has others and computes.
static void place_helpers(struct team *team, unsigned count) {
    const int here = sched_getcpu();
    cpu_set_t cpus;
    if (here < 0 || here >= CPU_SETSIZE || sched_getaffinity(0, sizeof cpus, &cpus) != 0) return;
    if (CPU_COUNT(&cpus) > 1 && !team->in_background) CPU_CLR(here, &cpus);
    if (!CPU_EQUAL(&cpus, &team->cpus)) team->cpus = cpus, team->placed = 0;
    for (; team->placed < count; team->placed++)
        pthread_setaffinity_np(team->members[team->placed].thread, sizeof cpus, &cpus);
}

static void wait_until_done(struct team *team, unsigned count, unsigned spins) {
    unsigned done;
    for (unsigned i = 0; (done = atomic_load(&team->done)) < count; i++) {
        if (i < spins) {
            pause_briefly();
            continue;
        }
        atomic_store(&team->sleeps, 1);
        if (atomic_load(&team->done) == done) futex_wait(&team->done, done, ~0u);
        atomic_store(&team->sleeps, 0);
    }
}

void run_threads(void (*body)(void *), void *data, unsigned threads, unsigned flags) {
    (void)flags;
    const unsigned by_caller = in_background ? 0 : 1;
    const unsigned asked = (unsigned)lesser(greater(threads, 1), MAX_HELPERS + by_caller) - by_caller;
    struct team *team = asked == 0 ? NULL : team_of(asked);
    if (team == NULL || team->helpers == 0) {
        body(data);
        return;
    }
    const unsigned wanted = (unsigned)lesser(asked, team->helpers), woken = asked < TOLD_APART ? wanted : team->helpers;
    place_helpers(team, woken);
    atomic_store_explicit(&team->woken, woken, memory_order_relaxed);
    team->body = body;
    team->data = data;
    atomic_store(&team->done, 0);
    atomic_store_explicit(&team->places, wanted, memory_order_release);
    atomic_fetch_add(&team->call, 1);
    futex_wake(&team->call, wanted, bits_of(wanted));
    if (by_caller)
        body(data);
    else
        wait_until_done(team, 1, 0);  // which leaves nothing for those still asleep
    wait_until_done(team, wanted - atomic_exchange(&team->places, 0), by_caller ? SPINS : 0);
}
#else
atomic_uint urgent;
int forward_begins(int threads) { return (void)threads, 0; }
void forward_ends(int threads, int cores) { (void)threads, (void)cores; }
void background_begins(void) {}
void background_ends(void) {}
void pause_background(int cores) { (void)cores; }
#endif
