/*
 * topology.h - which cores to use.
 */
#ifndef KS_TOPOLOGY_H
#define KS_TOPOLOGY_H

#include <pthread.h>
#include <stdint.h>

/* Number of cores in the fastest homogeneous cluster that this process may use: the cores of the
 * highest cpu_capacity (or maximum frequency where there is none), intersected with the affinity mask
 * and limited by the cgroup's CPU quota. At least 1. */
int32_t ks_topology_default_threads(void);

/* Keeps a worker on the fast cluster if n_threads fit there; otherwise leaves it to the scheduler.
 * Failure is ignored: it costs speed, nothing else. */
void ks_topology_bind_thread(pthread_t thread, int32_t n_threads);

#endif /* KS_TOPOLOGY_H */
