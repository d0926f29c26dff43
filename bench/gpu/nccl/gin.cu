// NCCL's device interface, call by call, on whatever GIN backend NCCL chose: checks first, then half round trips and rates.
//
//     gin [RANKS] [threads|processes] [MODE]   what the ranks are; rank r uses GPU r modulo their number (several on one GPU need
//                                       NCCL_MULTI_RANK_GPU_ENABLE=1). Prints "ok NAME" or "FAILED NAME: why" for each check.
//
//     MODE  checks   (default) every call, then half round trips and rates
//           rates    rates against blocks and contexts, large puts, half round trips
//           million  a million signals, none of which may be lost
//           fault    DOORBELL_FAULT fails a request of rank 0: every rank's host must hear of it (within 10 s; the row says when); then the job exits
//                    although kernels spin, or, with DOORBELL_ON_ERROR=release, when they were let go
//           killed   (processes) rank 1 is killed at work: likewise
//
// Rows of figures name the CPU cores that this process used meanwhile.
//
// Exit status: 0, 1 a check failed, 3 a kernel did not end or NCCL reported an asynchronous error.
#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_device.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#define CUDA(call)                                                                                    \
  do {                                                                                                \
    cudaError_t e = (call);                                                                           \
    if (e != cudaSuccess) {                                                                           \
      fprintf(stderr, "FAILED %s: %s\n", #call, cudaGetErrorString(e));                               \
      _exit(1);                                                                                       \
    }                                                                                                 \
  } while (0)
#define NCCL(call)                                                                                    \
  do {                                                                                                \
    ncclResult_t e = (call);                                                                          \
    if (e != ncclSuccess) {                                                                           \
      fprintf(stderr, "FAILED %s: %s (%s)\n", #call, ncclGetErrorString(e), ncclGetLastError(nullptr)); \
      _exit(1);                                                                                       \
    }                                                                                                 \
  } while (0)

constexpr int SIGNALS = 16, COUNTERS = 4;
constexpr size_t WINDOW = 64 << 20, HALF = WINDOW / 2;
static int BLOCKS = 4, CONTEXTS = 4;
static const char* mode = "checks";
static bool is_mode(const char* name) { return !strcmp(mode, name); }

struct Job {
  ncclWindow_t win;
  ncclDevComm comm;
  char* memory;        // the window, as this GPU sees it
  unsigned long long* out;  // pinned: what the kernel reports
  int rounds;
  size_t bytes;
};

__device__ unsigned long long now() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// Signals only grow here: every check counts from what it finds after a barrier that nobody passes alone.
__device__ void meet(ncclGin& gin, int block) {
  ncclGinBarrierSession<ncclCoopCta> bar{ncclCoopCta(), gin, ncclTeamTagWorld(), (uint32_t)block};
  bar.sync(ncclCoopCta(), cuda::memory_order_acq_rel, ncclGinFenceLevel::None);
}

__device__ char byte_of(int from, int to, size_t i, int round) { return char(i * 7 + from * 31 + to * 101 + round * 13 + (i >> 8)); }

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
      gin.put(ncclTeamWorld(j.comm), r, j.win, HALF + me * j.bytes, j.win, r * j.bytes, j.bytes, ncclGin_WeakSignalInc{0}, ncclGin_None{},
              ncclCoopThread{}, ncclGin_None{}, cuda::thread_scope_thread, cuda::thread_scope_system);
    }
    gin.waitSignal(ncclCoopCta(), 0, base + (unsigned long long)round * ranks);
    for (int r = 0; r < ranks; r++)
      for (size_t i = threadIdx.x; i < j.bytes; i += blockDim.x)
        wrong += j.memory[HALF + r * j.bytes + i] != byte_of(r, me, i, round);
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
      gin.put(ncclTeamWorld(j.comm), to, j.win, HALF, j.win, 64, 256, ncclGin_None{}, ncclGin_WeakCounterInc{3});
      gin.waitCounter(ncclCoopThread(), 3, i);
      *j.out += gin.readCounter(3) != i;
    }
    gin.put(ncclTeamWorld(j.comm), to, j.win, HALF, j.win, 64, 256, ncclGin_StrongSignalInc{2}, ncclGin_WeakCounterInc{3});
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
  if (threadIdx.x == 0) gin.get(ncclTeamWorld(j.comm), from, j.win, 0, j.win, HALF, j.bytes);
  __syncthreads();
  gin.flush(ncclCoopCta());
  __syncthreads();
  unsigned long long wrong = 0;
  for (size_t i = threadIdx.x; i < j.bytes; i += blockDim.x) wrong += ((volatile char*)j.memory)[HALF + i] != byte_of(from, 0, i, 5);
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
      gin.put(ncclTeamWorld(j.comm), to, j.win, HALF + 65536 + 8 * i, j.win, 65536 + 8 * i, 8, ncclGin_StrongSignalInc{4}, ncclGin_None{},
              ncclCoopThread{}, ncclGin_None{}, cuda::thread_scope_thread, cuda::thread_scope_device, flags);
    }
    gin.waitSignal(ncclCoopThread(), 4, base + 64);
    for (int i = 0; i < 64; i++) *j.out += ((volatile uint64_t*)(j.memory + HALF + 65536))[i] != i * 3 + 1;
    gin.flush(ncclCoopThread());
  }
  meet(gin, 0);
}

// Threads of all blocks post to one queue (mode GPU), or each block to its own (CTA), or one thread of each (THREAD).
__global__ void hammer(Job j, int mode) {
  ncclGinResourceSharingMode sharing = mode == 0 ? NCCL_GIN_RESOURCE_SHARING_GPU : mode == 1 ? NCCL_GIN_RESOURCE_SHARING_CTA : NCCL_GIN_RESOURCE_SHARING_THREAD;
  ncclGin gin{j.comm, mode == 0 ? 0 : (int)blockIdx.x, sharing};
  int to = (j.comm.rank + 1) % j.comm.nRanks;
  unsigned signal = 8 + mode;
  unsigned long long base = gin.readSignal(signal);
  ncclGin all{j.comm, 0};
  ncclGinBarrierSession<ncclCoopCta> bar{ncclCoopCta(), all, ncclTeamTagWorld(), blockIdx.x};
  bar.sync(ncclCoopCta(), cuda::memory_order_acq_rel, ncclGinFenceLevel::None);
  unsigned long long begin = now();
  unsigned posters = mode == 2 ? 1 : blockDim.x;
  if (threadIdx.x < posters)
    for (int i = 0; i < j.rounds; i++) {
      size_t at = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
      gin.put(ncclTeamWorld(j.comm), to, j.win, HALF + at, j.win, at, 8, ncclGin_StrongSignalInc{signal});
    }
  __syncthreads();
  if (mode != 0 || blockIdx.x == 0) {
    unsigned long long want = (unsigned long long)j.rounds * posters * (mode == 0 ? gridDim.x : 1);
    gin.waitSignal(ncclCoopCta(), signal, base + want);
    if (threadIdx.x == 0) atomicAdd(j.out, gin.readSignal(signal) != base + want);
  }
  gin.flush(ncclCoopCta());
  if (threadIdx.x == 0) atomicMax(j.out + 1, now() - begin);
  bar.sync(ncclCoopCta(), cuda::memory_order_acq_rel, ncclGinFenceLevel::None);
}

// Signals alone, from all threads of all blocks, each block on its context.
__global__ void signals(Job j) {
  ncclGin gin{j.comm, (int)blockIdx.x, NCCL_GIN_RESOURCE_SHARING_CTA};
  int to = (j.comm.rank + 1) % j.comm.nRanks;
  unsigned long long base = gin.readSignal(12), want = base + (unsigned long long)j.rounds * blockDim.x;
  ncclGin all{j.comm, 0};
  ncclGinBarrierSession<ncclCoopCta> bar{ncclCoopCta(), all, ncclTeamTagWorld(), blockIdx.x};
  bar.sync(ncclCoopCta(), cuda::memory_order_acq_rel, ncclGinFenceLevel::None);
  unsigned long long begin = now();
  for (int i = 0; i < j.rounds; i++) gin.signal(ncclTeamWorld(j.comm), to, ncclGin_StrongSignalInc{12});
  __syncthreads();
  gin.waitSignal(ncclCoopCta(), 12, want);
  gin.flush(ncclCoopCta());
  if (threadIdx.x == 0) {
    atomicAdd(j.out, gin.readSignal(12) != want);
    atomicMax(j.out + 1, now() - begin);
  }
  bar.sync(ncclCoopCta(), cuda::memory_order_acq_rel, ncclGinFenceLevel::None);
}

// Large puts, one after the other, complete at the end.
__global__ void large(Job j) {
  ncclGin gin{j.comm, 0, NCCL_GIN_RESOURCE_SHARING_THREAD};
  meet(gin, 0);
  if (threadIdx.x == 0) {
    unsigned long long begin = now();
    size_t slots = HALF / j.bytes;
    for (int i = 0; i < j.rounds; i++) {
      size_t at = i % slots * j.bytes;
      gin.put(ncclTeamWorld(j.comm), (j.comm.rank + 1) % j.comm.nRanks, j.win, HALF + at, j.win, at, j.bytes);
    }
    gin.flush(ncclCoopThread());
    j.out[1] = now() - begin;
  }
  __syncthreads();
  meet(gin, 0);
}

// All-to-alls of small messages, as fast as signals let them follow each other: two halves in turn, since a rank may be one round ahead.
__global__ void exchange(Job j) {
  ncclGin gin{j.comm, 0};
  int me = j.comm.rank, ranks = j.comm.nRanks;
  unsigned long long base = gin.readSignal(5);
  meet(gin, 0);
  unsigned long long begin = now();
  for (int round = 1; round <= j.rounds; round++) {
    size_t half = round % 2 * ranks * j.bytes;
    if (threadIdx.x < ranks)
      gin.put(ncclTeamWorld(j.comm), threadIdx.x, j.win, HALF + half + me * j.bytes, j.win, half + threadIdx.x * j.bytes, j.bytes,
              ncclGin_StrongSignalInc{5}, ncclGin_None{}, ncclCoopThread{}, ncclGin_None{}, cuda::thread_scope_thread, cuda::thread_scope_system);
    gin.waitSignal(ncclCoopCta(), 5, base + (unsigned long long)round * ranks);
  }
  gin.flush(ncclCoopCta());
  if (threadIdx.x == 0) j.out[1] = now() - begin;
  meet(gin, 0);
}

// Puts with signals, and then a wait for what nobody sends.
__global__ void stuck(Job j) {
  ncclGin gin{j.comm, 0, NCCL_GIN_RESOURCE_SHARING_THREAD};
  if (threadIdx.x) return;
  unsigned long long base = gin.readSignal(7);
  for (int i = 0; i < j.rounds; i++)
    gin.put(ncclTeamWorld(j.comm), (j.comm.rank + 1) % j.comm.nRanks, j.win, HALF, j.win, 0, 8, ncclGin_StrongSignalInc{6});
  gin.waitSignal(ncclCoopThread(), 7, base + 1000000);
}

// Rank 0 and rank 1 answer each other's signals; with bytes, each comes behind a put.
__global__ void ping_pong(Job j) {
  ncclGin gin{j.comm, 0, NCCL_GIN_RESOURCE_SHARING_THREAD};
  int me = j.comm.rank, peer = me ^ 1;
  unsigned long long base = gin.readSignal(6);
  meet(gin, 0);
  if (threadIdx.x == 0 && me < 2 && j.comm.nRanks > 1) {
    unsigned long long begin = 0;
    for (int i = 0; i < j.rounds; i++) {
      if (i == j.rounds / 10) begin = now();
      if (me == 1) gin.waitSignal(ncclCoopThread(), 6, base + i + 1);
      if (j.bytes)
        gin.put(ncclTeamWorld(j.comm), peer, j.win, HALF, j.win, 0, j.bytes, ncclGin_StrongSignalInc{6});
      else
        gin.signal(ncclTeamWorld(j.comm), peer, ncclGin_StrongSignalInc{6});
      if (me == 0) gin.waitSignal(ncclCoopThread(), 6, base + i + 1);
    }
    j.out[1] = (now() - begin) / (2 * (j.rounds - j.rounds / 10));
  }
  __syncthreads();
  meet(gin, 0);
}

struct Rank {
  int rank, ranks;
  ncclComm_t comm;
  cudaStream_t stream;
  Job job;
};

// What the ranks share, whether they are threads or processes.
struct Shared {
  pthread_barrier_t together;
  ncclUniqueId id;
  int failures;
  int ended;    // ranks that are at their end
  int threads;  // ranks of one process; 0: a process each
};
static Shared* shared;
static pthread_mutex_t printing = PTHREAD_MUTEX_INITIALIZER;

static void finish(Rank& r, const char* name) {
  auto begin = std::chrono::steady_clock::now();
  for (;;) {
    cudaError_t e = cudaStreamQuery(r.stream);
    if (e == cudaSuccess) return;
    if (e != cudaErrorNotReady) {
      fprintf(stderr, "FAILED %s: rank %d: %s\n", name, r.rank, cudaGetErrorString(e));
      _exit(1);
    }
    ncclResult_t async = ncclSuccess;
    ncclCommGetAsyncError(r.comm, &async);
    bool late = std::chrono::steady_clock::now() - begin > std::chrono::seconds(20);
    if ((async != ncclSuccess && async != ncclInProgress) || late) {
      fprintf(stderr, "FAILED %s: rank %d: %s\n", name, r.rank, late ? "the kernel does not end" : ncclGetErrorString(async));
      fflush(nullptr);
      _exit(3);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

static double seconds(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

// CPU cores of this process in the last run.
static double cores;

// Runs a kernel on all ranks at once; what they report is summed (first word) and printed by rank 0 (second).
template <typename Launch>
static unsigned long long run(Rank& r, const char* name, int rounds, size_t bytes, Launch launch) {
  r.job.rounds = rounds;
  r.job.bytes = bytes;
  r.job.out[0] = r.job.out[1] = 0;
  CUDA(cudaMemsetAsync(r.job.memory, 0, WINDOW, r.stream));
  CUDA(cudaStreamSynchronize(r.stream));
  pthread_barrier_wait(&shared->together);
  double wall = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
  launch(r.job);
  CUDA(cudaGetLastError());
  finish(r, name);
  wall = seconds(CLOCK_MONOTONIC) - wall, cpu = seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
  pthread_mutex_lock(&printing);
  if (r.rank == 0) cores = cpu / wall;
  if (r.job.out[0]) {
    __atomic_fetch_add(&shared->failures, 1, __ATOMIC_RELAXED);
    printf("FAILED %s: rank %d: %llu wrong\n", name, r.rank, r.job.out[0]);
  } else if (r.rank == 0) {
    printf("ok %s\n", name);
  }
  fflush(stdout);
  pthread_mutex_unlock(&printing);
  pthread_barrier_wait(&shared->together);
  return r.job.out[1];
}

// A kernel waits for ever; the host must hear why.
static void told(Rank& r) {
  r.job.rounds = 200;
  pthread_barrier_wait(&shared->together);
  auto begin = std::chrono::steady_clock::now();
  auto since = [&] { return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count(); };
  if (is_mode("killed")) {
    r.job.rounds = 1 << 30, r.job.bytes = 8;
    ping_pong<<<1, 32, 0, r.stream>>>(r.job);
    if (r.rank == 1) {
      std::this_thread::sleep_for(std::chrono::seconds(1));
      kill(getpid(), SIGKILL);
    }
  } else {
    stuck<<<1, 32, 0, r.stream>>>(r.job);
  }
  CUDA(cudaGetLastError());
  ncclResult_t async = ncclSuccess;
  while (async == ncclSuccess || async == ncclInProgress) {
    if (since() > 10000) {
      printf("FAILED %s: rank %d: its host hears nothing\n", mode, r.rank);
      fflush(nullptr);
      _exit(1);
    }
    NCCL(ncclCommGetAsyncError(r.comm, &async));
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  printf("ok %s: rank %d: ncclCommGetAsyncError says \"%s\" %.0f ms after the launch%s\n", mode, r.rank, ncclGetErrorString(async), since(),
         is_mode("killed") ? " (the kill was at 1000)" : "");
  const char* release = getenv("DOORBELL_ON_ERROR");
  if (release && !strcmp(release, "release")) {
    while (cudaStreamQuery(r.stream) == cudaErrorNotReady && since() < 15000) std::this_thread::sleep_for(std::chrono::microseconds(200));
    bool ended = cudaStreamQuery(r.stream) == cudaSuccess;
    printf("%s %s: rank %d: the kernel %s after %.0f ms\n", ended ? "ok" : "FAILED", mode, r.rank, ended ? "was let go" : "spins", since());
    if (!ended) __atomic_fetch_add(&shared->failures, 1, __ATOMIC_RELAXED);
  }
  fflush(stdout);
  // Kernels may spin still: the job ends all the same. Threads wait for each other.
  if (__atomic_add_fetch(&shared->ended, 1, __ATOMIC_RELAXED) == shared->threads || !shared->threads) _exit(shared->failures ? 1 : 0);
  pause();
}

// Every call once, and what it must have done.
static void checks(Rank& r) {
  int ranks = r.ranks;
  auto s = r.stream;
  run(r, "all-to-all, 8 B", 20, 8, [=](Job j) { all_to_all<<<1, 64, 0, s>>>(j); });
  run(r, "all-to-all, 4 KiB", 5, 4096, [=](Job j) { all_to_all<<<1, 64, 0, s>>>(j); });
  run(r, "all-to-all, 1 MiB", 2, ranks > 4 ? 1 << 18 : 1 << 20, [=](Job j) { all_to_all<<<1, 256, 0, s>>>(j); });
  run(r, "put value", 1, 0, [=](Job j) { values<<<1, 32, 0, s>>>(j); });
  run(r, "counters", 20, 0, [=](Job j) { counters<<<1, 32, 0, s>>>(j); });
  run(r, "get", 1, 100000, [=](Job j) { gets<<<1, 64, 0, s>>>(j); });
  run(r, "VA signals", 20, 0, [=](Job j) { va_signals<<<1, 32, 0, s>>>(j); });
  run(r, "aggregate", 1, 0, [=](Job j) { aggregate<<<1, 64, 0, s>>>(j); });
}

static void rates(Rank& r) {
  int rank = r.rank, ranks = r.ranks;
  auto s = r.stream;
  const char* modes[] = {"shared by the GPU", "shared by a block", "a thread's own"};
  for (int mode = 0; mode < 3; mode++) {
    int rounds = mode == 2 ? 500 : 50, threads = 32;
    unsigned long long ns = run(r, modes[mode], rounds, 0, [=](Job j) { hammer<<<BLOCKS, threads, 0, s>>>(j, mode); });
    double posts = double(rounds) * (mode == 2 ? 1 : threads) * BLOCKS;
    if (rank == 0 && ns) printf("rate put 8 B + signal, %s: %.3f M/s a rank; %.2f cores\n", modes[mode], posts * 1e3 / ns, cores);
  }
  if (ranks > 1)
    for (size_t bytes : {0ul, 8ul, 4096ul, 65536ul, 1ul << 20}) {
      char name[64];
      snprintf(name, sizeof name, bytes ? "ping-pong, %zu B and a signal" : "ping-pong, a signal", bytes);
      unsigned long long ns = run(r, name, bytes > 65536 ? 100 : 1000, bytes, [=](Job j) { ping_pong<<<1, 32, 0, s>>>(j); });
      if (rank == 0) printf("half round trip %s: %.2f us; %.2f cores\n", name, ns / 1e3, cores);
    }
  if (!is_mode("rates")) return;
  unsigned long long each = run(r, "all-to-alls of 8 B", 1000, 8, [=](Job j) { exchange<<<1, 32, 0, s>>>(j); });
  if (rank == 0) printf("all-to-all of 8 B: %.2f us a round; %.2f cores\n", each / 1e6, cores);
  for (int blocks = 1; blocks <= BLOCKS; blocks *= 2) {
    char name[64];
    snprintf(name, sizeof name, "%d block(s), a context each", blocks);
    int rounds = 500;
    unsigned long long ns = run(r, name, rounds, 0, [=](Job j) { hammer<<<blocks, 32, 0, s>>>(j, 1); });
    if (rank == 0 && ns) printf("rate put 8 B + signal, %s: %.3f M/s a rank; %.2f cores\n", name, rounds * 32.0 * blocks * 1e3 / ns, cores);
    ns = run(r, name, rounds, 0, [=](Job j) { signals<<<blocks, 32, 0, s>>>(j); });
    if (rank == 0 && ns) printf("rate signal, %s: %.3f M/s a rank; %.2f cores\n", name, rounds * 32.0 * blocks * 1e3 / ns, cores);
  }
  for (size_t bytes : {1ul << 16, 1ul << 20, 4ul << 20, 16ul << 20}) {
    char name[64];
    snprintf(name, sizeof name, "puts of %zu B", bytes);
    int rounds = bytes > 1 << 20 ? 200 : 1000;
    unsigned long long ns = run(r, name, rounds, bytes, [=](Job j) { large<<<1, 32, 0, s>>>(j); });
    if (rank == 0 && ns) printf("bandwidth %s: %.1f GB/s a rank; %.2f cores\n", name, double(rounds) * bytes / ns, cores);
  }
}

static void body(int rank, int ranks) {
  Rank r{};
  int gpus = 0;
  CUDA(cudaGetDeviceCount(&gpus));
  if (rank == 0) NCCL(ncclGetUniqueId(&shared->id));
  pthread_barrier_wait(&shared->together);
  r.rank = rank;
  r.ranks = ranks;
  CUDA(cudaSetDevice(rank % gpus));
  NCCL(ncclCommInitRank(&r.comm, ranks, shared->id, rank));
  ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
  NCCL(ncclCommQueryProperties(r.comm, &properties));
  if (rank == 0) printf("ranks %d, GPUs %d, device API %d, GIN type %d\n", ranks, gpus, (int)properties.deviceApiSupport, (int)properties.ginType);
  void* memory;
  NCCL(ncclMemAlloc(&memory, WINDOW));
  NCCL(ncclCommWindowRegister(r.comm, memory, WINDOW, &r.job.win, NCCL_WIN_COLL_SYMMETRIC));
  r.job.memory = (char*)memory;
  ncclDevCommRequirements needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  needs.worldGinBarrierCount = BLOCKS;
  needs.ginSignalCount = SIGNALS;
  needs.ginCounterCount = COUNTERS;
  needs.ginContextCount = CONTEXTS;
  needs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
  NCCL(ncclDevCommCreate(r.comm, &needs, &r.job.comm));
  CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
  CUDA(cudaHostAlloc((void**)&r.job.out, 64, cudaHostAllocMapped | cudaHostAllocPortable));
  if (is_mode("fault") || is_mode("killed")) told(r);
  if (is_mode("checks")) checks(r);
  if (is_mode("million"))
    run(r, "a million signals", 1000000 / (BLOCKS * 32) + 1, 0, [=](Job j) { signals<<<BLOCKS, 32, 0, r.stream>>>(j); });
  if (!is_mode("million")) rates(r);
  NCCL(ncclDevCommDestroy(r.comm, &r.job.comm));
  NCCL(ncclCommWindowDeregister(r.comm, r.job.win));
  NCCL(ncclMemFree(memory));
  pthread_barrier_wait(&shared->together);
  NCCL(ncclCommFinalize(r.comm));
  NCCL(ncclCommDestroy(r.comm));
}

int main(int argc, char** argv) {
  // Kernels that wait for copies must not meet the loading of others, nor share their channel.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  int ranks = argc > 1 ? atoi(argv[1]) : 2;
  bool processes = argc > 2 && !strcmp(argv[2], "processes");
  if (argc > 3) mode = argv[3];
  if (is_mode("rates")) BLOCKS = CONTEXTS = 16;
  shared = (Shared*)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  shared->threads = processes ? 0 : ranks;
  pthread_barrierattr_t attributes;
  pthread_barrierattr_init(&attributes);
  pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(&shared->together, &attributes, ranks);
  int worst = 0;
  if (processes) {
    // Before CUDA is used: it does not survive a fork.
    for (int r = 0; r < ranks; r++)
      if (fork() == 0) {
        // Scripts are for rank 0: the others hear of it.
        if (r) unsetenv("DOORBELL_FAULT");
        body(r, ranks);
        fflush(nullptr);
        _exit(0);
      }
    for (int r = 0; r < ranks; r++) {
      int status = 0;
      wait(&status);
      int code = WIFEXITED(status) ? WEXITSTATUS(status) : 4;
      if (is_mode("killed") && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) code = 0;
      worst = code > worst ? code : worst;
      if (code) break;  // the others would wait for it
    }
    if (worst) {
      signal(SIGTERM, SIG_IGN);
      kill(0, SIGTERM);
    }
  } else {
    std::vector<std::thread> all;
    for (int r = 0; r < ranks; r++) all.emplace_back(body, r, ranks);
    for (auto& t : all) t.join();
  }
  printf(shared->failures ? "%d check(s) FAILED\n" : "all checks passed\n", shared->failures);
  return shared->failures ? 1 : worst;
}
