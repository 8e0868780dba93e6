/* A pool of threads that claim the parts of a job by an atomic counter.

A job ends when its parts are complete, so a thread that the system has not scheduled delays at most the part that it has
claimed. Threads wait for the next job in a short loop, then in the kernel. */

#define _GNU_SOURCE
#include "kernels.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_THREADS = 256, SPINS = 4000 };

static pthread_mutex_t owner = PTHREAD_MUTEX_INITIALIZER; /* of the current job */
static _Atomic int wanted = 1;                            /* threads, including the calling one */
static int started;                                       /* threads of the pool */

/* The current job. The claim has the number of parts in its upper half and the next part in its lower half: a late
thread claims from the job whose function and data it then reads. */
static part_function *job_function;
static const void *job_data;
static _Atomic uint64_t claim;
static _Atomic uint32_t done;
static _Atomic uint32_t generation; /* threads wait for its change */
static _Atomic uint32_t sleepers;
static _Atomic uint32_t owner_sleeps;

static void wait_while(_Atomic uint32_t *word, uint32_t value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word, int count)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

static inline void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void work(void)
{
    for (;;) {
        uint64_t claimed = atomic_fetch_add(&claim, 1);
        uint32_t parts = (uint32_t)(claimed >> 32), part = (uint32_t)claimed;
        if (part >= parts)
            return;
        job_function(job_data, part);
        if (atomic_fetch_add(&done, 1) + 1 == parts && atomic_load(&owner_sleeps))
            wake(&done, 1);
    }
}

static void *serve(void *argument)
{
    int index = (int)(intptr_t)argument;
    uint32_t seen = 0;
    for (;;) {
        int spins = 0;
        uint32_t now;
        while ((now = atomic_load(&generation)) == seen) {
            if (spins++ < SPINS) {
                pause_cpu();
                continue;
            }
            atomic_fetch_add(&sleepers, 1);
            wait_while(&generation, seen);
            atomic_fetch_sub(&sleepers, 1);
        }
        seen = now;
        if (index + 1 < atomic_load(&wanted))
            work();
    }
    return NULL;
}

/* A child process has only the thread that forked. */
static void forget_threads(void)
{
    pthread_mutex_init(&owner, NULL);
    started = 0;
    atomic_store(&sleepers, 0);
    atomic_store(&owner_sleeps, 0);
    atomic_store(&claim, 0);
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, forget_threads);
}

/* Start missing threads. Without permission or memory for more, the job runs on those that exist. */
static void start_threads(void)
{
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    if (started + 1 >= wanted || pthread_attr_init(&attributes))
        return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 1 << 20);
    sigfillset(&all); /* signals are for Python's threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (started + 1 < wanted && !pthread_create(&thread, &attributes, serve, (void *)(intptr_t)started))
        started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

void run_parts(part_function *function, const void *data, int64_t parts)
{
    /* If another thread owns the pool, this job runs on its own thread. */
    if (parts <= 1 || wanted <= 1 || parts > INT32_MAX || pthread_mutex_trylock(&owner)) {
        for (int64_t part = 0; part < parts; part++)
            function(data, part);
        return;
    }
    start_threads();
    job_function = function;
    job_data = data;
    atomic_store(&done, 0);
    atomic_store(&claim, (uint64_t)parts << 32);
    atomic_fetch_add(&generation, 1);
    if (atomic_load(&sleepers))
        wake(&generation, MAX_THREADS);
    work();
    int spins = 0;
    uint32_t complete;
    while ((complete = atomic_load(&done)) < (uint32_t)parts) {
        if (spins++ < SPINS) {
            pause_cpu();
            continue;
        }
        atomic_store(&owner_sleeps, 1);
        if ((complete = atomic_load(&done)) < (uint32_t)parts)
            wait_while(&done, complete);
        atomic_store(&owner_sleeps, 0);
    }
    pthread_mutex_unlock(&owner);
}

int64_t count_threads(void)
{
    return atomic_load(&wanted);
}

EXPORT void millrace_set_threads(int64_t threads)
{
    pthread_mutex_lock(&owner);
    wanted = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : (int)threads;
    pthread_mutex_unlock(&owner);
}
