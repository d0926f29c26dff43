// The kernels of gin.cu: NCCL's device interface, call by call. What they count in the first word of `out` is wrong.
#pragma once
#include <nccl_device.h>

#include "ranks.h"
#include "words.cuh"

constexpr int SIGNALS = 16, COUNTERS = 4;

struct Job {
  ncclWindow_t win, strict;  // writes to `strict`, which has memory of its own, keep their order
  ncclDevComm comm;
  char* memory;              // the window, as this GPU sees it
  size_t size;               // its bytes: the first half is put from, the second put to
  unsigned long long* out;   // pinned: what the kernel reports
  int rounds;
  size_t bytes;
  unsigned long long before;  // signals of earlier kernels that all blocks share
};

__device__ int next(const Job& j) { return (j.comm.rank + 1) % j.comm.nRanks; }
__device__ int previous(const Job& j) { return (j.comm.rank + j.comm.nRanks - 1) % j.comm.nRanks; }
__device__ volatile uint64_t* words(const Job& j, size_t at) { return (volatile uint64_t*)(j.memory + at); }

// Signals only grow here: every check counts from what it finds after a barrier that nobody passes alone. A block meets over the context that it posts to,
// in the same sharing mode: what two modes at a time do to one queue is undefined. A block's mode (CTA) looks for its turn in the multiprocessor's own
// cache, where it need never see a slot that another block published, and a thread's (THREAD) reserves slots without an atomic.
__device__ void meet(ncclGin& gin, int block) {
  ncclGinBarrierSession<ncclCoopCta> bar{ncclCoopCta(), gin, ncclTeamTagWorld(), (uint32_t)block};
  bar.sync(ncclCoopCta(), cuda::memory_order_acq_rel, ncclGinFenceLevel::None);
}

__global__ void all_to_all(Job j) {
  ncclGin gin{j.comm, 0};
  int me = j.comm.rank, ranks = j.comm.nRanks;
  unsigned long long wrong = 0, base = gin.readSignal(0);
  for (int round = 1; round <= j.rounds; round++) {
    for (int r = 0; r < ranks; r++)
      for (size_t i = threadIdx.x; i < j.bytes; i += blockDim.x) j.memory[r * j.bytes + i] = byte_of(me, r, i, round);
    __syncthreads();
    meet(gin, 0);
    if (threadIdx.x < ranks) {
      int r = threadIdx.x;
      gin.put(ncclTeamWorld(j.comm), r, j.win, j.size / 2 + me * j.bytes, j.win, r * j.bytes, j.bytes, ncclGin_WeakSignalInc{0}, ncclGin_None{},
              ncclCoopThread{}, ncclGin_None{}, cuda::thread_scope_thread, cuda::thread_scope_system);
    }
    gin.waitSignal(ncclCoopCta(), 0, base + (unsigned long long)round * ranks);
    for (int r = 0; r < ranks; r++)
      for (size_t i = threadIdx.x; i < j.bytes; i += blockDim.x)
        wrong += j.memory[j.size / 2 + r * j.bytes + i] != byte_of(r, me, i, round);
    gin.flush(ncclCoopCta());
    meet(gin, 0);
  }
  atomicAdd(j.out, wrong);
}

__global__ void values(Job j) {
  ncclGin gin{j.comm, 1};
  int me = j.comm.rank, to = (me + 1) % j.comm.nRanks, from = (me + j.comm.nRanks - 1) % j.comm.nRanks;
  unsigned long long base = gin.readSignal(1);
  meet(gin, 0);
  if (threadIdx.x == 0) {
    ncclTeam world = ncclTeamWorld(j.comm);
    gin.putValue(world, to, j.win, 0, (uint8_t)(me + 1), ncclGin_StrongSignalAdd{1, 10});
    gin.putValue(world, to, j.win, 2, (uint16_t)(me * 1000 + 7), ncclGin_StrongSignalAdd{1, 10});
    gin.putValue(world, to, j.win, 4, (uint32_t)(me * 100000 + 9), ncclGin_WeakSignalAdd{1, 10});
    gin.putValue(world, to, j.win, 8, (uint64_t)me << 40 | 11, ncclGin_WeakSignalAdd{1, 10});
    gin.waitSignal(ncclCoopThread(), 1, base + 40);
    *j.out += *(volatile uint8_t*)j.memory != from + 1;
    *j.out += *(volatile uint16_t*)(j.memory + 2) != from * 1000 + 7;
    *j.out += *(volatile uint32_t*)(j.memory + 4) != from * 100000 + 9;
    *j.out += *(volatile uint64_t*)(j.memory + 8) != ((uint64_t)from << 40 | 11);
    gin.flush(ncclCoopThread());
  }
  meet(gin, 0);
}

__global__ void counters(Job j) {
  ncclGin gin{j.comm, 2};
  int to = (j.comm.rank + 1) % j.comm.nRanks;
  meet(gin, 0);
  if (threadIdx.x == 0) {
    gin.resetCounter(3);
    __threadfence_system();
    for (int i = 1; i <= j.rounds; i++) {
      gin.put(ncclTeamWorld(j.comm), to, j.win, j.size / 2, j.win, 64, 256, ncclGin_None{}, ncclGin_WeakCounterInc{3});
      gin.waitCounter(ncclCoopThread(), 3, i);
      *j.out += gin.readCounter(3) != i;
    }
    gin.put(ncclTeamWorld(j.comm), to, j.win, j.size / 2, j.win, 64, 256, ncclGin_StrongSignalInc{2}, ncclGin_WeakCounterInc{3});
    gin.waitCounter(ncclCoopThread(), 3, j.rounds + 1);
  }
  meet(gin, 0);
}

__global__ void gets(Job j) {
  ncclGin gin{j.comm, 3};
  int me = j.comm.rank, from = (me + 1) % j.comm.nRanks;
  for (size_t i = threadIdx.x; i < j.bytes; i += blockDim.x) j.memory[i] = byte_of(me, 0, i, 5);
  __threadfence_system();
  __syncthreads();
  meet(gin, 0);
  if (threadIdx.x == 0) gin.get(ncclTeamWorld(j.comm), from, j.win, 0, j.win, j.size / 2, j.bytes);
  __syncthreads();
  gin.flush(ncclCoopCta());
  __syncthreads();
  unsigned long long wrong = 0;
  for (size_t i = threadIdx.x; i < j.bytes; i += blockDim.x) wrong += ((volatile char*)j.memory)[j.size / 2 + i] != byte_of(from, 0, i, 5);
  atomicAdd(j.out, wrong);
  meet(gin, 0);
}

__global__ void va_signals(Job j) {
  ncclGin gin{j.comm, 0};
  int to = (j.comm.rank + 1) % j.comm.nRanks;
  if (threadIdx.x == 0) {
    *(volatile uint64_t*)(j.memory + 4096) = 0;
    __threadfence_system();
  }
  __syncthreads();
  meet(gin, 0);
  if (threadIdx.x == 0) {
    ncclTeam world = ncclTeamWorld(j.comm);
    for (int i = 0; i < j.rounds; i++) gin.signal(world, to, ncclGin_StrongVASignalInc{j.win, 4096});
    gin.signal(world, to, ncclGin_WeakVASignalAdd{j.win, 4096, 1ull << 40});
    unsigned long long want = (1ull << 40) + j.rounds;
    gin.waitSignal(ncclCoopThread(), j.win, 4096, want);
    *j.out += gin.readSignal(j.win, 4096) != want;
    gin.flush(ncclCoopThread());
  }
  meet(gin, 0);
}

__global__ void aggregate(Job j) {
  ncclGin gin{j.comm, 1};
  int to = (j.comm.rank + 1) % j.comm.nRanks;
  for (int i = threadIdx.x; i < 64; i += blockDim.x) ((volatile uint64_t*)(j.memory + 65536))[i] = i * 3 + 1;
  __threadfence_system();
  __syncthreads();
  unsigned long long base = gin.readSignal(4);
  meet(gin, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 64; i++) {
      uint32_t flags = i < 63 ? ncclGinOptFlagsAggregateRequests | ncclGinOptFlagsMaySkipCreditCheck : ncclGinOptFlagsDefault;
      gin.put(ncclTeamWorld(j.comm), to, j.win, j.size / 2 + 65536 + 8 * i, j.win, 65536 + 8 * i, 8, ncclGin_StrongSignalInc{4}, ncclGin_None{},
              ncclCoopThread{}, ncclGin_None{}, cuda::thread_scope_thread, cuda::thread_scope_device, flags);
    }
    gin.waitSignal(ncclCoopThread(), 4, base + 64);
    for (int i = 0; i < 64; i++) *j.out += ((volatile uint64_t*)(j.memory + j.size / 2 + 65536))[i] != i * 3 + 1;
    gin.flush(ncclCoopThread());
  }
  meet(gin, 0);
}

// Threads of all blocks post to one queue (sharing by the GPU), or each block to its own (CTA), or one thread of each (THREAD). Every put has a word of its
// own, and when the signals say that all have come each word must be there.
__global__ void hammer(Job j, int mode) {
  ncclGinResourceSharingMode sharing = mode == 0 ? NCCL_GIN_RESOURCE_SHARING_GPU : mode == 1 ? NCCL_GIN_RESOURCE_SHARING_CTA : NCCL_GIN_RESOURCE_SHARING_THREAD;
  ncclGin gin{j.comm, mode == 0 ? 0 : (int)blockIdx.x, sharing};
  unsigned signal = 8 + mode, posters = mode == 2 ? 1 : blockDim.x;
  // Where all blocks share a signal, others may have begun before this one looks.
  unsigned long long base = mode == 0 ? j.before : gin.readSignal(signal);
  size_t each = posters * (size_t)j.rounds, first = each * blockIdx.x;
  for (size_t i = threadIdx.x; i < each; i += blockDim.x) words(j, 0)[first + i] = word_of(j.comm.rank, first + i, mode);
  __threadfence_system();
  meet(gin, blockIdx.x);
  unsigned long long begin = now();
  if (threadIdx.x < posters)
    for (int i = 0; i < j.rounds; i++) {
      size_t at = 8 * (first + threadIdx.x * (size_t)j.rounds + i);
      gin.put(ncclTeamWorld(j.comm), next(j), j.win, j.size / 2 + at, j.win, at, 8, ncclGin_StrongSignalInc{signal});
    }
  __syncthreads();
  // One block looks for all where all post to one queue.
  size_t from = mode == 0 ? 0 : first, count = mode != 0 ? each : blockIdx.x == 0 ? each * gridDim.x : 0;
  if (count) {
    gin.waitSignal(ncclCoopCta(), signal, base + count);
    if (threadIdx.x == 0) atomicAdd(j.out, gin.readSignal(signal) != base + count);
  }
  gin.flush(ncclCoopCta());
  if (threadIdx.x == 0) atomicMax(j.out + 1, now() - begin);
  unsigned long long wrong = 0;
  for (size_t i = from + threadIdx.x; i < from + count; i += blockDim.x) wrong += words(j, j.size / 2)[i] != word_of(previous(j), i, mode);
  atomicAdd(j.out, wrong);
  meet(gin, blockIdx.x);
}

// A thread of each block puts words with a signal each; a thread of another warp reads along, and when a signal says `n` the first `n` must be there.
__global__ void read_along(Job j) {
  ncclGin gin{j.comm, (int)blockIdx.x, NCCL_GIN_RESOURCE_SHARING_THREAD};
  size_t first = (size_t)j.rounds * blockIdx.x;
  unsigned long long base = gin.readSignal(14);
  for (size_t i = threadIdx.x; i < (size_t)j.rounds; i += blockDim.x) words(j, 0)[first + i] = word_of(j.comm.rank, first + i, 14);
  __threadfence_system();
  meet(gin, blockIdx.x);
  unsigned long long begin = now(), wrong = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < j.rounds; i++) {
      size_t at = 8 * (first + i);
      gin.put(ncclTeamWorld(j.comm), next(j), j.win, j.size / 2 + at, j.win, at, 8, ncclGin_StrongSignalInc{14});
    }
    gin.flush(ncclCoopThread());
  }
  if (threadIdx.x == 32)
    for (unsigned long long seen = 0; seen < (unsigned)j.rounds;) {
      unsigned long long said = gin.readSignal(14) - base;
      wrong += said < seen || said > (unsigned)j.rounds;
      for (; seen < said && seen < (unsigned)j.rounds; seen++)
        wrong += words(j, j.size / 2)[first + seen] != word_of(previous(j), first + seen, 14);
    }
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(j.out + 1, now() - begin);
  atomicAdd(j.out, wrong);
  meet(gin, blockIdx.x);
}

// Signals alone, from all threads of all blocks, each block on its context.
__global__ void signals(Job j) {
  ncclGin gin{j.comm, (int)blockIdx.x, NCCL_GIN_RESOURCE_SHARING_CTA};
  int to = (j.comm.rank + 1) % j.comm.nRanks;
  unsigned long long base = gin.readSignal(12), want = base + (unsigned long long)j.rounds * blockDim.x;
  meet(gin, blockIdx.x);
  unsigned long long begin = now();
  for (int i = 0; i < j.rounds; i++) gin.signal(ncclTeamWorld(j.comm), to, ncclGin_StrongSignalInc{12});
  __syncthreads();
  gin.waitSignal(ncclCoopCta(), 12, want);
  gin.flush(ncclCoopCta());
  if (threadIdx.x == 0) {
    atomicAdd(j.out, gin.readSignal(12) != want);
    atomicMax(j.out + 1, now() - begin);
  }
  meet(gin, blockIdx.x);
}

// Large puts, one after the other, complete at the end; then every word must be there.
__global__ void large(Job j) {
  ncclGin gin{j.comm, 0, NCCL_GIN_RESOURCE_SHARING_THREAD};
  unsigned long long base = gin.readSignal(15);
  size_t slots = j.size / 2 / j.bytes, used = slots < (size_t)j.rounds ? slots : (size_t)j.rounds, count = used * j.bytes / 8;
  for (size_t i = threadIdx.x; i < count; i += blockDim.x) words(j, 0)[i] = word_of(j.comm.rank, i, j.bytes);
  __threadfence_system();
  __syncthreads();
  meet(gin, 0);
  if (threadIdx.x == 0) {
    unsigned long long begin = now();
    for (int i = 0; i < j.rounds; i++) {
      size_t at = i % slots * j.bytes;
      gin.put(ncclTeamWorld(j.comm), next(j), j.win, j.size / 2 + at, j.win, at, j.bytes);
    }
    gin.flush(ncclCoopThread());
    j.out[1] = now() - begin;
    // A flush says nothing of the other side; a signal behind all of it does.
    gin.signal(ncclTeamWorld(j.comm), next(j), ncclGin_StrongSignalInc{15});
  }
  __syncthreads();
  gin.waitSignal(ncclCoopCta(), 15, base + 1);
  unsigned long long wrong = 0;
  for (size_t i = threadIdx.x; i < count; i += blockDim.x) wrong += words(j, j.size / 2)[i] != word_of(previous(j), i, j.bytes);
  atomicAdd(j.out, wrong);
  meet(gin, 0);
}

// All-to-alls of words, as fast as signals let them follow each other: two halves in turn, since a rank may be one round ahead. Each half has a signal
// of its own: with one for both, a rank's next word could make up the number before another's word of this round has come.
__global__ void exchange(Job j) {
  ncclGin gin{j.comm, 0};
  int me = j.comm.rank, ranks = j.comm.nRanks;
  unsigned long long want[2] = {gin.readSignal(5), gin.readSignal(6)}, wrong = 0;
  meet(gin, 0);
  unsigned long long begin = now();
  for (int round = 1; round <= j.rounds; round++) {
    ncclGinSignal_t signal = 5 + round % 2;
    size_t half = round % 2 * ranks * 8, r = threadIdx.x;
    if (r < ranks) {
      words(j, half)[r] = word_of(me, r, round);
      gin.put(ncclTeamWorld(j.comm), r, j.win, j.size / 2 + half + me * 8, j.win, half + r * 8, 8, ncclGin_StrongSignalInc{signal}, ncclGin_None{},
              ncclCoopThread{}, ncclGin_None{}, cuda::thread_scope_thread, cuda::thread_scope_system);
    }
    want[round % 2] += ranks;
    gin.waitSignal(ncclCoopCta(), signal, want[round % 2]);
    if (r < ranks) wrong += words(j, j.size / 2 + half)[r] != word_of(r, me, round);
  }
  gin.flush(ncclCoopCta());
  if (threadIdx.x == 0) j.out[1] = now() - begin;
  atomicAdd(j.out, wrong);
  meet(gin, 0);
}

// Puts with signals, and then a wait for what nobody sends.
__global__ void stuck(Job j) {
  ncclGin gin{j.comm, 0, NCCL_GIN_RESOURCE_SHARING_THREAD};
  if (threadIdx.x) return;
  unsigned long long base = gin.readSignal(7);
  for (int i = 0; i < j.rounds; i++)
    gin.put(ncclTeamWorld(j.comm), next(j), j.win, j.size / 2, j.win, 0, 8, ncclGin_StrongSignalInc{6});
  gin.waitSignal(ncclCoopThread(), 7, base + 1000000);
}

// Rank 0 and rank 1 answer each other's signals. With bytes, each comes behind a put, whose first and last word the receiver looks at before it answers.
__global__ void ping_pong(Job j) {
  ncclGin gin{j.comm, 0, NCCL_GIN_RESOURCE_SHARING_THREAD};
  int me = j.comm.rank, peer = me ^ 1;
  unsigned long long base = gin.readSignal(6), wrong = 0;
  meet(gin, 0);
  if (threadIdx.x == 0 && me < 2 && j.comm.nRanks > 1) {
    unsigned long long begin = 0;
    size_t last = j.bytes / 8 - 1;
    auto receive = [&](int i) {
      gin.waitSignal(ncclCoopThread(), 6, base + i + 1);
      if (j.bytes) wrong += words(j, j.size / 2)[0] != word_of(peer, 0, i) || words(j, j.size / 2)[last] != word_of(peer, last, i);
    };
    for (int i = 0; i < j.rounds; i++) {
      if (i == j.rounds / 10) begin = now();
      if (me == 1) receive(i);
      if (j.bytes) {
        // The answer said that what was here before has arrived.
        words(j, 0)[0] = word_of(me, 0, i), words(j, 0)[last] = word_of(me, last, i);
        gin.put(ncclTeamWorld(j.comm), peer, j.win, j.size / 2, j.win, 0, j.bytes, ncclGin_StrongSignalInc{6}, ncclGin_None{}, ncclCoopThread{},
                ncclGin_None{}, cuda::thread_scope_thread, cuda::thread_scope_system);
      } else {
        gin.signal(ncclTeamWorld(j.comm), peer, ncclGin_StrongSignalInc{6});
      }
      if (me == 0) receive(i);
    }
    j.out[0] += wrong;
    j.out[1] = (now() - begin) / (2 * (j.rounds - j.rounds / 10));
  }
  __syncthreads();
  meet(gin, 0);
}

// How far a kernel came, for the host if it does not end.
__device__ void stage(const Job& j, unsigned long long number, unsigned long long value = 0) {
  if (threadIdx.x) return;
  ((volatile unsigned long long*)j.out)[2] = number;
  ((volatile unsigned long long*)j.out)[3] = value;
}

// A signal's reset, and its shadow.
__global__ void shadows(Job j) {
  ncclGin gin{j.comm, 2};
  ncclTeam world = ncclTeamWorld(j.comm);
  unsigned long long wrong = 0, n = j.rounds;
  if (threadIdx.x == 0) gin.resetSignal(13);
  __threadfence_system();
  __syncthreads();
  stage(j, 1);
  // Nobody signals before everybody has reset.
  meet(gin, 0);
  stage(j, 2);
  if (threadIdx.x == 0) {
    for (int i = 0; i < j.rounds; i++) gin.signal(world, next(j), ncclGin_StrongSignalInc{13});
    gin.increaseSignalShadow(13, n);
    gin.waitSignalMeetShadow(ncclCoopThread(), 13);
    wrong += gin.readSignal(13) != n || *gin.getSignalShadowPtr(13) != n;
  }
  stage(j, 3, gin.readSignal(13));
  meet(gin, 0);
  stage(j, 4);
  if (threadIdx.x == 0) {
    for (int i = 0; i < j.rounds; i++) gin.signal(world, next(j), ncclGin_StrongSignalAdd{13, 3});
    stage(j, 5, *gin.getSignalShadowPtr(13));
  }
  // By the whole warp: what is found is given to all lanes, whoever asks for it alone waits for the others for ever (ncclCoopBcast of a tile).
  __syncwarp();
  for (uint64_t seen = 0; seen < 3 * n;) {
    uint64_t before = 0, delta = 0;
    gin.waitSignalFollowShadow(ncclCoopWarp(), 13, (uint64_t)1, &before, &delta);
    if (threadIdx.x == 0) wrong += before != n + seen || delta == 0 || delta % 3;
    seen = __shfl_sync(-1u, seen + delta, 0);
    stage(j, 6, seen);
  }
  if (threadIdx.x == 0) wrong += *gin.getSignalShadowPtr(13) != 4 * n;
  meet(gin, 0);
  stage(j, 7);
  if (threadIdx.x == 0) {
    gin.resetSignal(13);
    wrong += gin.readSignal(13) != 0 || *gin.getSignalShadowPtr(13) != 0;
    __threadfence_system();
    j.out[0] += wrong;
  }
  meet(gin, 0);
  stage(j, 8);
}

// Requests that are waited for one by one: one that is done has read its source, which is the same for all.
__global__ void flush_each(Job j) {
  ncclGin gin{j.comm, 3};
  ncclTeam world = ncclTeamWorld(j.comm);
  unsigned long long wrong = 0, base = gin.readSignal(12);
  meet(gin, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < j.rounds; i++) {
      words(j, 0)[0] = word_of(j.comm.rank, i, 13);
      gin.put(world, next(j), j.win, j.size / 2 + 8 * i, j.win, 0, 8, ncclGin_None{}, ncclGin_None{}, ncclCoopThread{}, ncclGin_None{},
              cuda::thread_scope_thread, cuda::thread_scope_system);
      ncclGinRequest_t request;
      gin.flushAsync(world, next(j), &request);
      stage(j, 1, i);
      gin.wait(request);
    }
    gin.signal(world, next(j), ncclGin_StrongSignalInc{12});
    stage(j, 2);
    gin.waitSignal(ncclCoopThread(), 12, base + 1);
    for (int i = 0; i < j.rounds; i++) wrong += words(j, j.size / 2)[i] != word_of(previous(j), i, 13);
    j.out[0] += wrong;
  }
  meet(gin, 0);
}

// Without any signal: in a window of strict order a word that is put later says that what was put before it is there.
__global__ void strict_order(Job j) {
  ncclGin gin{j.comm, 3, NCCL_GIN_RESOURCE_SHARING_THREAD};
  constexpr size_t DATA = 32;  // words of data a round
  size_t flags = DATA * 8 * j.rounds, flag = j.size / 2 + flags;
  for (size_t i = threadIdx.x; i < DATA * j.rounds; i += blockDim.x) words(j, 0)[i] = word_of(j.comm.rank, i, 3);
  for (size_t i = threadIdx.x; i < (size_t)j.rounds; i += blockDim.x) words(j, flags)[i] = i + 1;
  __threadfence_system();
  __syncthreads();
  meet(gin, 0);
  unsigned long long wrong = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < j.rounds; i++) {
      gin.put(ncclTeamWorld(j.comm), next(j), j.strict, j.size / 2 + DATA * 8 * i, j.strict, DATA * 8 * i, DATA * 8);
      gin.put(ncclTeamWorld(j.comm), next(j), j.strict, flag, j.strict, flags + 8 * i, 8);
    }
    gin.flush(ncclCoopThread());
  }
  if (threadIdx.x == 32)
    for (uint64_t seen = 0; seen < (unsigned)j.rounds;) {
      uint64_t said = *words(j, flag);
      __threadfence_system();
      wrong += said < seen || said > (unsigned)j.rounds;
      for (; seen < said && seen < (unsigned)j.rounds; seen++)
        for (size_t i = 0; i < DATA; i++) wrong += words(j, j.size / 2)[DATA * seen + i] != word_of(previous(j), DATA * seen + i, 3);
    }
  atomicAdd(j.out, wrong);
  __syncthreads();
  meet(gin, 0);
}

// A put and a get of more than a GiB each, in three parts: fill; move, with a signal behind; compare.
__global__ void fill(Job j) {
  size_t step = (size_t)gridDim.x * blockDim.x;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < j.bytes / 8; i += step) words(j, 0)[i] = word_of(j.comm.rank, i, j.rounds);
}

__global__ void move(Job j, bool get) {
  ncclGin gin{j.comm, 0};
  unsigned long long base = gin.readSignal(15);
  __threadfence_system();
  meet(gin, 0);
  if (threadIdx.x == 0) {
    unsigned long long begin = now();
    if (get)
      gin.get(ncclTeamWorld(j.comm), previous(j), j.win, 0, j.win, j.size / 2, j.bytes);
    else
      gin.put(ncclTeamWorld(j.comm), next(j), j.win, j.size / 2, j.win, 0, j.bytes, ncclGin_StrongSignalInc{15});
    gin.flush(ncclCoopThread());
    if (!get) gin.waitSignal(ncclCoopThread(), 15, base + 1);
    j.out[1] = now() - begin;
  }
  __syncthreads();
  meet(gin, 0);
}

__global__ void compare(Job j) {
  size_t step = (size_t)gridDim.x * blockDim.x;
  unsigned long long wrong = 0;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < j.bytes / 8; i += step)
    wrong += words(j, j.size / 2)[i] != word_of(previous(j), i, j.rounds);
  if (wrong) atomicAdd(j.out, wrong);
}
