/* Kernels run under a sanitizer. Every tensor lies in memory of its own, of exactly its size; every portion of the
 * blocks is run by a thread of its own, all of which are started before one is waited for: whatever two portions
 * share, nothing orders.
 *
 * Arguments: files, one per kernel, of what this program reads: the count of tensors, their bytes and those of a
 * thread's scratch memory (64-bit integers), the inputs. The output is written over the file.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PORTIONS = 4, MOST_TENSORS = 16 };

typedef void (*roller_task)(void *state, int64_t worker, int64_t begin, int64_t end);
typedef void (*roller_parallel_for)(roller_task task, void *state, int64_t count);
typedef int32_t (*kernel)(roller_parallel_for parallel, void *const *tensors);

/* The kernels in order, and behind the last one a null pointer: written by the test. */
extern const kernel kernels[];

typedef struct {
    roller_task task;
    void *state;
    int64_t worker, begin, end;
} portion;

static void *run(void *argument) {
    portion *own = argument;
    own->task(own->state, own->worker, own->begin, own->end);
    return NULL;
}

/* In the place of the pool. */
void roller_parallel(roller_task task, void *state, int64_t count) {
    pthread_t threads[PORTIONS];
    portion portions[PORTIONS];
    for (int64_t worker = 0; worker < PORTIONS; worker++) {
        portions[worker] = (portion){task, state, worker, count * worker / PORTIONS, count * (worker + 1) / PORTIONS};
        pthread_create(&threads[worker], NULL, run, &portions[worker]);
    }
    for (int worker = 0; worker < PORTIONS; worker++)
        pthread_join(threads[worker], NULL);
}

static void *memory(int64_t bytes) {
    void *found = NULL;
    if (posix_memalign(&found, 64, bytes ? bytes : 1))
        exit(2);
    memset(found, 0xFF, bytes);
    return found;
}

static int run_file(kernel entry, const char *path) {
    void *tensors[MOST_TENSORS + 1];
    int64_t count, bytes[MOST_TENSORS], scratch_bytes;
    FILE *file = fopen(path, "r+b");
    if (!file || fread(&count, 8, 1, file) != 1 || fread(bytes, 8, count, file) != count ||
        fread(&scratch_bytes, 8, 1, file) != 1)
        return 2;
    for (int64_t tensor = 0; tensor < count; tensor++) {
        tensors[tensor] = memory(bytes[tensor]);
        if (tensor < count - 1 && fread(tensors[tensor], 1, bytes[tensor], file) != bytes[tensor])
            return 2;
    }
    tensors[count] = memory(PORTIONS * scratch_bytes);
    if (entry(NULL, tensors))
        return 2;
    rewind(file);
    fwrite(tensors[count - 1], 1, bytes[count - 1], file);
    fclose(file);
    for (int64_t tensor = 0; tensor <= count; tensor++)
        free(tensors[tensor]);
    return 0;
}

int main(int argc, char **argv) {
    int status = 0;
    for (int number = 0; number < argc - 1 && kernels[number]; number++)
        status |= run_file(kernels[number], argv[number + 1]);
    return status;
}
