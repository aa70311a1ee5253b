/* Preloaded into the processes of a stack, it has the wall clock go ahead by so many seconds as the
 * file CLOCK_FILE says, which may change at any time. Clocks that only measure are left alone, and
 * so are waits. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile int64_t *ahead_s;

__attribute__((constructor)) static void map_clock(void)
{
    const char *path = getenv("CLOCK_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *mapped = mmap(NULL, sizeof *ahead_s, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED)
        ahead_s = mapped;
}

int clock_gettime(clockid_t id, struct timespec *now)
{
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, now);
    if (!failed && ahead_s && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        now->tv_sec += *ahead_s;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone)
{
    struct timespec read;
    (void)zone;
    int failed = clock_gettime(CLOCK_REALTIME, &read);
    if (!failed) {
        now->tv_sec = read.tv_sec;
        now->tv_usec = read.tv_nsec / 1000;
    }
    return failed;
}

time_t time(time_t *now)
{
    struct timespec read;
    clock_gettime(CLOCK_REALTIME, &read);
    if (now)
        *now = read.tv_sec;
    return read.tv_sec;
}
