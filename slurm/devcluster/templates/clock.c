/* The wall clock as seen by the jobs of a node, ahead of this machine's by DEVCLUSTER_CLOCK_SECONDS. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static int (*now_of)(clockid_t, struct timespec *);
static time_t ahead;

__attribute__((constructor)) static void begin(void) {
  const char *seconds = getenv("DEVCLUSTER_CLOCK_SECONDS");
  now_of = dlsym(RTLD_NEXT, "clock_gettime");
  ahead = seconds ? atol(seconds) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  if (!now_of)
    begin();
  int failed = now_of(clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    now->tv_sec += ahead;
  return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
  struct timespec precise;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *kept) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME_COARSE, &now);
  if (kept)
    *kept = now.tv_sec;
  return now.tv_sec;
}
