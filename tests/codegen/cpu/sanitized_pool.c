/* The pool at work, to be linked with pool.c under a sanitizer: calls whose results are read at once, calls from
 * several threads, and a forked process, which starts threads of its own.
 *
 * The process has as many processors as it says: __wrap_ functions stand in for what asks the system about them.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 4, BLOCKS = 1000, CALLS = 5, CALLERS = 3 };

typedef void (*roller_task)(void *state, int64_t worker, int64_t begin, int64_t end);
void roller_parallel(roller_task task, void *state, int64_t count);
int64_t roller_threads(void);

int __wrap_sched_getaffinity(pid_t process, size_t size, cpu_set_t *set) {
    CPU_ZERO_S(size, set);
    for (int cpu = 0; cpu < THREADS; cpu++)
        CPU_SET_S(cpu, size, set);
    return 0;
}

int __wrap_pthread_attr_setaffinity_np(pthread_attr_t *attributes, size_t size, const cpu_set_t *set) {
    return 0;
}

/* Calls come from every processor in turn, and from one that the process does not have. */
int __wrap_sched_getcpu(void) {
    static _Atomic int calls;
    return atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed) % (THREADS + 1) - 1;
}

/* The files that tell which processors share a core: none does. */
FILE *__wrap_fopen(const char *path, const char *mode) {
    return NULL;
}

typedef struct {
    int64_t blocks[BLOCKS], run_by[THREADS];
    _Atomic int arrived, expected;
} results;

static void fill(void *state, int64_t worker, int64_t begin, int64_t end) {
    results *to = state;
    for (int64_t block = begin; block < end; block++)
        to->blocks[block] += block;
    to->run_by[worker] += end - begin;
}

/* Every thread has one block of as many and holds it until all have written, which orders nothing. */
static void meet(void *state, int64_t worker, int64_t begin, int64_t end) {
    results *to = state;
    to->blocks[begin] = begin;
    atomic_fetch_add_explicit(&to->arrived, 1, memory_order_relaxed);
    while (atomic_load_explicit(&to->arrived, memory_order_relaxed) <
           atomic_load_explicit(&to->expected, memory_order_relaxed))
        sched_yield();
}

static void check(int holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "the pool is wrong: %s\n", what);
        _exit(1);
    }
}

static void *calls(void *unused) {
    results *own = calloc(1, sizeof *own);
    for (int call = 0; call < CALLS; call++)
        roller_parallel(fill, own, BLOCKS);
    int64_t run = 0;
    for (int thread = 0; thread < THREADS; thread++)
        run += own->run_by[thread];
    check(run == CALLS * BLOCKS, "blocks are run once");
    for (int64_t block = 0; block < BLOCKS; block++)
        check(own->blocks[block] == CALLS * block, "every block is run");
    free(own);
    return NULL;
}

int main(void) {
    results *all = calloc(1, sizeof *all);
    check(roller_threads() == THREADS, "a thread per processor");
    for (int call = 0; call < CALLS; call++) {
        atomic_fetch_add_explicit(&all->expected, THREADS, memory_order_relaxed);
        roller_parallel(meet, all, THREADS);
        for (int64_t block = 0; block < THREADS; block++) {
            check(all->blocks[block] == block, "a call returns when all blocks are done");
            all->blocks[block] = -1;
        }
    }
    pthread_t callers[CALLERS];
    for (int caller = 0; caller < CALLERS; caller++)
        pthread_create(&callers[caller], NULL, calls, NULL);
    for (int caller = 0; caller < CALLERS; caller++)
        pthread_join(callers[caller], NULL);
#ifndef __SANITIZE_THREAD__ /* which starts no threads in a forked process */
    int status = 1;
    pid_t child = fork();
    if (child == 0) {
        calls(NULL);
        _exit(0);
    }
    waitpid(child, &status, 0);
    check(status == 0, "a forked process has a pool");
#endif
    free(all);
    return 0;
}
