/* Threads that make whole batches: Python submits a batch and waits for it.
 *
 * Jobs are served in the order they came, samples of the next job begin while the last ones of this job finish, so
 * no thread waits at the end of a batch. A sample's result goes to its own slot: which thread made it shows nowhere.
 * Threads take no signals; those are for Python. On Linux they also give way to it: the thread that feeds the GPU is
 * late otherwise when every core decodes. */
#define _GNU_SOURCE
#include "drumline.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif
#include <time.h>
#include <unistd.h>

enum { READ_FILES, READ_SIZES, MAKE_WINDOWS, GATHER };

#define NICE 10

/* A file's buffer is used again for the next file in its slot, unless it is much larger than that needs: kept at the
 * largest file seen, the buffers of all slots would creep up to it. They are pages of their own, since heaps of many
 * threads, with buffers of every size coming and going, grow for an hour before they stop. */
#define ROOM_UNIT ((int64_t)64 << 10)

static int fits(int64_t room, int64_t size) { return size <= room && room <= 2 * size + ROOM_UNIT; }

static void give_back(uint8_t **data, int64_t *room) {
    if (*room > 0) munmap(*data, (size_t)*room);
    *data = NULL, *room = 0;
}

static int take(uint8_t **data, int64_t *room, int64_t size) {
    give_back(data, room);
    int64_t rounded = (size / ROOM_UNIT + 1) * ROOM_UNIT;
    void *pages = mmap(NULL, (size_t)rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return ENOMEM;
    *data = pages, *room = rounded;
    return 0;
}
/* Larger files are left to Python, which reads no more than one for each thread at a time, up to its own limit. */
#define LARGEST_FILE ((int64_t)64 << 20)

/* Mirrored by `native/__init__.py`. Arrays belong to Python and outlive the job. */
typedef struct {
    int32_t kind, count, size, filter, version13;
    const char **paths;
    uint8_t **data;
    int64_t *lengths, *rooms; /* `rooms`: bytes allocated at `data`, for files read here */
    int32_t *stored;          /* STORED numbers each */
    const int32_t *geometry;
    uint8_t *out;
    const int64_t *offsets; /* gathering: where in `out` each sample's bytes go */
    int32_t *status;
} Work;

typedef struct Job {
    Work work;
    int next, left;
    struct Job *following;
} Job;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t arrived, finished;
    Job *first, *last;
    int64_t spent[4]; /* nanoseconds reading, and making, of these on a core; bytes read */
    int threads, stopping;
    pthread_t ids[];
} Pool;

/* Status 0 or an errno; with an error, Python reads the file again and decides what it means. Opening does not wait for
 * what has become a pipe. */
static int read_file(const char *path, uint8_t **data, int64_t *length, int64_t *room) {
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) return errno;
    struct stat facts;
    int problem = 0;
    *length = 0;
    if (fstat(file, &facts) != 0)
        problem = errno;
    else if (!S_ISREG(facts.st_mode))
        problem = S_ISDIR(facts.st_mode) ? EISDIR : EINVAL;
    else if (facts.st_size > LARGEST_FILE)
        problem = EFBIG;
    else if (!fits(*room, facts.st_size))
        problem = take(data, room, facts.st_size);
    while (!problem && *length < facts.st_size) {
        ssize_t got = read(file, *data + *length, (size_t)(facts.st_size - *length));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) problem = errno;
        if (got <= 0) break;
        *length += got;
    }
    close(file);
    return problem;
}

static void serve(const Work *w, int i, Scratch *scratch) {
    if (w->kind == READ_FILES) {
        int problem = read_file(w->paths[i], &w->data[i], &w->lengths[i], &w->rooms[i]);
        w->status[i] = problem;
        if (!problem) jpeg_size(w->data[i], (size_t)w->lengths[i], w->stored + STORED * i);
        return;
    }
    if (w->kind == READ_SIZES) {
        w->status[i] = 0;
        jpeg_size(w->data[i], (size_t)w->lengths[i], w->stored + STORED * i);
        return;
    }
    if (w->kind == GATHER) {
        memcpy(w->out + w->offsets[i], w->data[i], (size_t)w->lengths[i]);
        w->status[i] = jpeg_runs_clean(w->data[i], (size_t)w->lengths[i]) ? DONE : LEFT_TO_PILLOW;
        return;
    }
    const int32_t *stored = w->stored + STORED * i, *geometry = w->geometry + (size_t)GEOMETRY * i;
    if (stored[0] == 0 || geometry[RIGHT] == 0) {
        w->status[i] = LEFT_TO_PILLOW;
        return;
    }
    size_t window = 3 * (size_t)w->size * (size_t)w->size;
    w->status[i] = jpeg_window(w->data[i], (size_t)w->lengths[i], stored[0], stored[1], geometry, w->size, w->filter,
                               w->version13, w->out + window * (size_t)i, scratch);
    scratch_trim(scratch);
}

static int64_t nanoseconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void *work(void *argument) {
    Pool *pool = argument;
    Scratch scratch = {{0}, {0}};
#ifdef __linux__
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), NICE);
#endif
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->first && !pool->stopping) pthread_cond_wait(&pool->arrived, &pool->lock);
        if (pool->stopping) break;
        Job *job = pool->first;
        int i = job->next++;
        if (job->next == job->work.count) {
            pool->first = job->following;
            if (!pool->first) pool->last = NULL;
        }
        pthread_mutex_unlock(&pool->lock);
        int made = job->work.kind == MAKE_WINDOWS;
        int64_t began = nanoseconds(CLOCK_MONOTONIC), on_core = made ? nanoseconds(CLOCK_THREAD_CPUTIME_ID) : 0;
        serve(&job->work, i, &scratch);
        int64_t took = nanoseconds(CLOCK_MONOTONIC) - began;
        if (made) on_core = nanoseconds(CLOCK_THREAD_CPUTIME_ID) - on_core;
        pthread_mutex_lock(&pool->lock);
        pool->spent[made] += took, pool->spent[2] += on_core;
        if (job->work.kind <= READ_SIZES && job->work.status[i] == 0) pool->spent[3] += job->work.lengths[i];
        if (--job->left == 0) pthread_cond_broadcast(&pool->finished);
    }
    pthread_mutex_unlock(&pool->lock);
    scratch_free(&scratch);
    return NULL;
}

EXPORT void drum_pool_close(Pool *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->stopping = 1;
    pthread_cond_broadcast(&pool->arrived);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->threads; i++) pthread_join(pool->ids[i], NULL);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->arrived);
    pthread_cond_destroy(&pool->finished);
    free(pool);
}

EXPORT Pool *drum_pool_open(int threads) {
    Pool *pool = calloc(1, sizeof(Pool) + sizeof(pthread_t) * (size_t)threads);
    if (!pool) return NULL;
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->arrived, NULL);
    pthread_cond_init(&pool->finished, &clock);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; pool->threads < threads; pool->threads++)
        if (pthread_create(&pool->ids[pool->threads], NULL, work, pool)) break;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (pool->threads == 0) {
        drum_pool_close(pool);
        return NULL;
    }
    return pool;
}

EXPORT Job *drum_submit(Pool *pool, const Work *asked) {
    Job *job = calloc(1, sizeof(Job));
    if (!job) return NULL;
    job->work = *asked;
    job->left = asked->count;
    if (asked->count == 0) return job;
    pthread_mutex_lock(&pool->lock);
    if (pool->last)
        pool->last->following = job;
    else
        pool->first = job;
    pool->last = job;
    pthread_cond_broadcast(&pool->arrived);
    pthread_mutex_unlock(&pool->lock);
    return job;
}

/* 1 when the job is done (and gone), 0 when the time is up first. */
EXPORT int drum_wait(Pool *pool, Job *job, double seconds) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    int64_t nanoseconds = until.tv_nsec + (int64_t)(seconds * 1e9);
    until.tv_sec += nanoseconds / 1000000000, until.tv_nsec = nanoseconds % 1000000000;
    int late = 0;
    pthread_mutex_lock(&pool->lock);
    while (job->left > 0 && !late) late = pthread_cond_timedwait(&pool->finished, &pool->lock, &until);
    int done = job->left == 0;
    pthread_mutex_unlock(&pool->lock);
    if (done) free(job);
    return done;
}

/* What the threads have spent so far, as in `Pool`. */
EXPORT void drum_spent(Pool *pool, int64_t *spent) {
    pthread_mutex_lock(&pool->lock);
    memcpy(spent, pool->spent, sizeof pool->spent);
    pthread_mutex_unlock(&pool->lock);
}

/* Gives back what reading files has allocated. */
EXPORT void drum_free_files(uint8_t **data, int64_t *rooms, int count) {
    for (int i = 0; i < count; i++) give_back(&data[i], &rooms[i]);
}

/* One sample on the calling thread. */
EXPORT int drum_make_window(const uint8_t *data, int64_t length, const int32_t *stored, const int32_t *geometry,
                            int size, int filter, int version13, uint8_t *out) {
    Scratch scratch = {{0}, {0}};
    int status = jpeg_window(data, (size_t)length, stored[0], stored[1], geometry, size, filter, version13, out,
                             &scratch);
    scratch_free(&scratch);
    return status;
}

/* What Python must agree with: checked when the library is loaded. */
EXPORT int drum_work_bytes(void) { return (int)sizeof(Work); }

EXPORT int drum_jpeg_size(const uint8_t *data, int64_t length, int32_t *stored) {
    return jpeg_size(data, (size_t)length, stored);
}
