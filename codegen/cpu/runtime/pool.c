/* Blocks of a kernel shared out among threads: the whole runtime of CPU kernels, linked into every shared library.
 *
 * Workers are started once and pinned, one per core of the process. A call is worked on by its own thread, wherever the
 * system has put it, in the place of that core's worker, which sleeps: two threads on one core would run after each
 * other. Between two calls workers spin for a while, since a sleeping thread wakes up after longer than a small kernel
 * takes, and then sleep, so that an idle process is idle.
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
    /* The worker of every processor, as far as the process may use it; -1 of others. */
    int worker_of[CPU_SETSIZE];
    /* The blocks that each thread has left: the next one, and in the upper half the one to stop before. */
    struct {
        _Alignas(LINE) _Atomic uint64_t blocks;
    } range[MAX_THREADS];
    /* Calls so far, times MAX_THREADS, and the worker in whose place the last one's own thread works. */
    _Alignas(LINE) _Atomic uint64_t job;
    _Alignas(LINE) _Atomic int busy;
    pthread_mutex_t sleep, call;
    struct {
        pthread_cond_t wake;
        int sleeps;
    } worker[MAX_THREADS];
} pool = {.sleep = PTHREAD_MUTEX_INITIALIZER, .call = PTHREAD_MUTEX_INITIALIZER};

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
    int spins = SPINS; /* the first call may come from this core */
    for (uint64_t seen = 0, job;; seen = job) {
        while ((job = atomic_load_explicit(&pool.job, memory_order_acquire)) == seen && spins++ < SPINS)
            relax();
        if (job == seen) {
            pthread_mutex_lock(&pool.sleep);
            pool.worker[worker].sleeps = 1;
            while ((job = atomic_load_explicit(&pool.job, memory_order_acquire)) == seen)
                pthread_cond_wait(&pool.worker[worker].wake, &pool.sleep);
            pool.worker[worker].sleeps = 0;
            pthread_mutex_unlock(&pool.sleep);
        }
        /* The call's own thread needs this core: no spinning. A call that this worker takes no part in may be over
         * by now, and others after it. */
        spins = SPINS;
        if (job % MAX_THREADS != (uint64_t)worker) {
            share(worker);
            atomic_fetch_sub_explicit(&pool.busy, 1, memory_order_release);
            spins = 0;
        }
    }
    return NULL;
}

/* The first processor of a processor's core; itself where the process may not use that one. */
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
    return first >= 0 && first < CPU_SETSIZE && CPU_ISSET(first, allowed) ? first : cpu;
}

/* A forked process has none of the threads, whatever they were doing. */
static void forget(void) {
    pool.threads = pool.started = 0;
    pthread_mutex_init(&pool.sleep, NULL);
    pthread_mutex_init(&pool.call, NULL);
    atomic_store(&pool.job, 0);
}

/* Starts a worker that runs on one processor. */
static void start_worker(int cpu) {
    pthread_t thread;
    pthread_attr_t attributes;
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(cpu, &own);
    pool.worker[pool.threads].sleeps = 0;
    pthread_cond_init(&pool.worker[pool.threads].wake, NULL);
    pthread_attr_init(&attributes);
    pthread_attr_setaffinity_np(&attributes, sizeof own, &own);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &attributes, work, (void *)(intptr_t)pool.threads) == 0)
        pool.worker_of[cpu] = pool.threads++;
    pthread_attr_destroy(&attributes);
}

static void start(void) {
    static int registered;
    cpu_set_t allowed;
    int core[CPU_SETSIZE], cores = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        core[cpu] = pool.worker_of[cpu] = -1;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0)
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
            if (CPU_ISSET(cpu, &allowed)) {
                core[cpu] = first_of_core(cpu, &allowed);
                cores += core[cpu] == cpu;
            }
    int wanted = cores < MAX_THREADS ? cores : MAX_THREADS;
    const char *given = getenv("ROLLER_NUM_THREADS");
    if (given && atoi(given) > 0 && atoi(given) < wanted)
        wanted = atoi(given);
    if (!registered)
        registered = pthread_atfork(NULL, NULL, forget) == 0;
    pool.threads = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE && wanted > 1 && pool.threads < wanted; cpu++)
        if (core[cpu] == cpu)
            start_worker(cpu);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (core[cpu] >= 0)
            pool.worker_of[cpu] = pool.worker_of[core[cpu]];
    pool.threads = pool.threads ? pool.threads : 1;
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
        int cpu = sched_getcpu();
        int own = cpu >= 0 && cpu < CPU_SETSIZE && pool.worker_of[cpu] >= 0 ? pool.worker_of[cpu] : 0;
        pthread_mutex_lock(&pool.sleep);
        uint64_t calls = atomic_load_explicit(&pool.job, memory_order_relaxed) / MAX_THREADS + 1;
        atomic_store_explicit(&pool.job, calls * MAX_THREADS + (uint64_t)own, memory_order_release);
        for (int worker = 0; worker < pool.threads; worker++)
            if (worker != own && pool.worker[worker].sleeps)
                pthread_cond_signal(&pool.worker[worker].wake);
        pthread_mutex_unlock(&pool.sleep);
        share(own);
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
