/* Blocks of a kernel shared out among threads: the whole runtime of CPU kernels, linked into every shared library.
 *
 * Workers are started once and pinned, one per core of the process. Between two calls they spin for a while, since a
 * sleeping thread wakes up after longer than a small kernel takes, and then sleep, so that an idle process is idle.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* Runs the blocks from begin up to end; `worker` counts from 0 and is below roller_threads(). */
typedef void (*roller_task)(void *state, int64_t worker, int64_t begin, int64_t end);

/* Runs a task for blocks 0 to count - 1 and returns when all are done. */
typedef void (*roller_parallel_for)(roller_task task, void *state, int64_t count);

enum { MAX_THREADS = 1024, SPINS = 20000, LINE = 64 };

static struct {
    roller_task task;
    void *state;
    int threads, started;
    /* The blocks that each thread has left: the next one, and in the upper half the one to stop before. */
    struct {
        _Alignas(LINE) _Atomic uint64_t blocks;
    } range[MAX_THREADS];
    _Alignas(LINE) _Atomic uint64_t job;
    _Alignas(LINE) _Atomic int busy;
    pthread_mutex_t sleep, call;
    pthread_cond_t wake;
} pool = {.sleep = PTHREAD_MUTEX_INITIALIZER, .call = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static uint64_t range(uint32_t begin, uint32_t end) {
    return begin | (uint64_t)end << 32;
}

/* Takes up to a quarter of what is left of a range, from its front or its back; 0 where nothing is. */
static int take(int victim, int front, int64_t *begin, int64_t *end) {
    uint64_t held = atomic_load_explicit(&pool.range[victim].blocks, memory_order_relaxed);
    for (;;) {
        uint32_t low = (uint32_t)held, high = (uint32_t)(held >> 32);
        if (low >= high)
            return 0;
        uint32_t portion = high - low > 7 ? (high - low) / 4 : 1;
        uint64_t left = front ? range(low + portion, high) : range(low, high - portion);
        if (atomic_compare_exchange_weak_explicit(&pool.range[victim].blocks, &held, left, memory_order_relaxed,
                                                  memory_order_relaxed)) {
            *begin = front ? low : high - portion;
            *end = *begin + portion;
            return 1;
        }
    }
}

/* A thread goes through a range of its own, always on to the block after the last, whose operands it asked for
 * meanwhile; then it helps those that were held up, from the far end of theirs. */
static void share(int64_t worker) {
    int64_t begin, end;
    for (int other = 0; other < pool.threads; other++)
        while (take((worker + other) % pool.threads, other == 0, &begin, &end))
            pool.task(pool.state, worker, begin, end);
}

static void *work(void *argument) {
    int64_t worker = (int64_t)(intptr_t)argument;
    for (uint64_t seen = 0;; seen++) {
        int spins = 0;
        while (atomic_load_explicit(&pool.job, memory_order_acquire) == seen && spins++ < SPINS)
            relax();
        if (atomic_load_explicit(&pool.job, memory_order_acquire) == seen) {
            pthread_mutex_lock(&pool.sleep);
            while (atomic_load_explicit(&pool.job, memory_order_acquire) == seen)
                pthread_cond_wait(&pool.wake, &pool.sleep);
            pthread_mutex_unlock(&pool.sleep);
        }
        share(worker);
        atomic_fetch_sub_explicit(&pool.busy, 1, memory_order_release);
    }
    return NULL;
}

/* Whether a processor is the first of its core, as far as the process may use them. */
static int first_of_core(int cpu, const cpu_set_t *allowed) {
    char path[80];
    int first = cpu;
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    FILE *file = fopen(path, "r");
    if (file) {
        if (fscanf(file, "%d", &first) != 1)
            first = cpu;
        fclose(file);
    }
    return first == cpu || first < 0 || first >= CPU_SETSIZE || !CPU_ISSET(first, allowed);
}

/* A forked process has none of the threads, whatever they were doing. */
static void forget(void) {
    pool.threads = pool.started = 0;
    pthread_mutex_init(&pool.sleep, NULL);
    pthread_mutex_init(&pool.call, NULL);
    pthread_cond_init(&pool.wake, NULL);
    atomic_store(&pool.job, 0);
}

static void start(void) {
    static int registered;
    cpu_set_t allowed;
    int cores[MAX_THREADS], count = 0;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0)
        for (int cpu = 0; cpu < CPU_SETSIZE && count < MAX_THREADS; cpu++)
            if (CPU_ISSET(cpu, &allowed) && first_of_core(cpu, &allowed))
                cores[count++] = cpu;
    int wanted = count ? count : 1;
    const char *given = getenv("ROLLER_NUM_THREADS");
    if (given && atoi(given) > 0 && atoi(given) < wanted)
        wanted = atoi(given);
    if (!registered)
        registered = pthread_atfork(NULL, NULL, forget) == 0;
    pool.threads = 1;
    /* The caller's own thread is the first, on whatever core it runs. */
    for (int worker = 1; worker < wanted; worker++) {
        pthread_t thread;
        pthread_attr_t attributes;
        cpu_set_t own;
        CPU_ZERO(&own);
        CPU_SET(cores[worker], &own);
        pthread_attr_init(&attributes);
        pthread_attr_setaffinity_np(&attributes, sizeof own, &own);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        if (pthread_create(&thread, &attributes, work, (void *)(intptr_t)pool.threads) == 0)
            pool.threads++;
        pthread_attr_destroy(&attributes);
    }
    pool.started = 1;
}

/* Threads that share the blocks of a call, the caller's own among them. */
int64_t roller_threads(void) {
    pthread_mutex_lock(&pool.call);
    if (!pool.started)
        start();
    pthread_mutex_unlock(&pool.call);
    return pool.threads;
}

/* Hands out the blocks of a task, as many to each of the first threads. */
static void hand_out(roller_task task, void *state, int64_t count, int64_t threads) {
    pool.task = task;
    pool.state = state;
    for (int64_t thread = 0; thread < pool.threads; thread++) {
        int64_t rank = thread < threads ? thread : threads;
        int64_t next = thread < threads ? thread + 1 : threads;
        uint64_t own = range(count * rank / threads, count * next / threads);
        atomic_store_explicit(&pool.range[thread].blocks, own, memory_order_relaxed);
    }
}

/* Runs blocks 0 to count - 1 and returns when all are done. Calls from several threads take turns. */
void roller_parallel(roller_task task, void *state, int64_t count) {
    pthread_mutex_lock(&pool.call);
    if (!pool.started)
        start();
    if (pool.threads == 1 || count == 1) {
        task(state, 0, 0, count);
    } else {
        hand_out(task, state, count, pool.threads);
        atomic_store_explicit(&pool.busy, pool.threads - 1, memory_order_relaxed);
        pthread_mutex_lock(&pool.sleep);
        atomic_fetch_add_explicit(&pool.job, 1, memory_order_release);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep);
        share(0);
        /* Where cores are shared, a worker may need this one to finish. */
        for (int spins = 0; atomic_load_explicit(&pool.busy, memory_order_acquire); spins++)
            spins < SPINS ? relax() : (void)sched_yield();
    }
    pthread_mutex_unlock(&pool.call);
}

/* What an OpenMP runtime calls a parallel region, a thread's number in it, and the most threads that it starts. */
static struct {
    void (*parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
    int (*thread)(void), (*most)(void);
} openmp;

/* GOMP_parallel, omp_get_thread_num and omp_get_max_threads of the runtime that the process uses otherwise. */
void roller_set_openmp(void *parallel, void *thread, void *most) {
    openmp.parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    openmp.thread = (int (*)(void))thread;
    openmp.most = (int (*)(void))most;
}

static void share_of_openmp(void *unused) {
    (void)unused;
    share(openmp.thread());
}

/* As roller_parallel, on the threads of OpenMP: two pools on the same cores would wait for each other. */
void roller_parallel_openmp(roller_task task, void *state, int64_t count) {
    pthread_mutex_lock(&pool.call);
    if (!pool.started)
        start();
    int64_t threads = openmp.most();
    threads = threads < pool.threads ? threads : pool.threads;
    if (threads <= 1 || count == 1) {
        task(state, 0, 0, count);
    } else {
        hand_out(task, state, count, threads);
        openmp.parallel(share_of_openmp, NULL, (unsigned)threads, 0);
    }
    pthread_mutex_unlock(&pool.call);
}
