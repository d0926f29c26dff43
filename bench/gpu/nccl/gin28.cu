// The device interface of NCCL 2.28.7 to 2.29, as PyTorch's wheels carry it: checks, then half round trips and rates.
//
//     gin28 [RANKS]     ranks are threads of this process, a GPU each
//
// Exit status: 0, 1 a check failed, 3 a kernel did not end or NCCL reported an asynchronous error.
#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_device.h>
#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#define OK(call, good, text)                                                     \
  do {                                                                           \
    auto e = (call);                                                             \
    if (e != good) fprintf(stderr, "FAILED %s: %s\n", #call, text(e)), _exit(1); \
  } while (0)
#define CUDA(call) OK(call, cudaSuccess, cudaGetErrorString)
#define NCCL(call) OK(call, ncclSuccess, ncclGetErrorString)

constexpr int CONTEXTS = 4;
constexpr size_t WINDOW = 8 << 20, HALF = WINDOW / 2;

struct Job {
  ncclWindow_t win;
  ncclDevComm comm;
  char* memory;
  unsigned long long* out;
  int rounds;
  size_t bytes;
};

__device__ unsigned long long now() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

__device__ char byte_of(int from, int to, size_t i, int round) { return char(i * 7 + from * 31 + to * 101 + round * 13 + (i >> 8)); }

// Every rank puts to every rank with a signal. Two halves in turn: a rank may be one round ahead, and no more.
__global__ void all_to_all(Job j) {
  ncclGin gin{j.comm, 0};
  int me = j.comm.rank, ranks = j.comm.nRanks;
  unsigned long long wrong = 0;
  for (int round = 1; round <= j.rounds; round++) {
    size_t half = round % 2 * ranks * j.bytes;
    for (int r = 0; r < ranks; r++)
      for (size_t i = threadIdx.x; i < j.bytes; i += blockDim.x) j.memory[half + r * j.bytes + i] = byte_of(me, r, i, round);
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x < ranks)
      gin.put(ncclTeamWorld(j.comm), threadIdx.x, j.win, HALF + half + me * j.bytes, j.win, half + threadIdx.x * j.bytes, j.bytes, ncclGin_SignalInc{0});
    gin.waitSignal(ncclCoopCta(), 0, (unsigned long long)round * ranks);
    for (int r = 0; r < ranks; r++)
      for (size_t i = threadIdx.x; i < j.bytes; i += blockDim.x)
        wrong += ((volatile char*)j.memory)[HALF + half + r * j.bytes + i] != byte_of(r, me, i, round);
    gin.flush(ncclCoopCta());
    __syncthreads();
  }
  atomicAdd(j.out, wrong);
}

__global__ void values_and_counters(Job j) {
  ncclGin gin{j.comm, 1};
  int me = j.comm.rank, to = (me + 1) % j.comm.nRanks, from = (me + j.comm.nRanks - 1) % j.comm.nRanks;
  if (threadIdx.x) return;
  ncclTeam world = ncclTeamWorld(j.comm);
  gin.putValue(world, to, j.win, HALF, (uint64_t)me << 40 | 11, ncclGin_SignalAdd{1, 10});
  gin.waitSignal(ncclCoopThread(), 1, 10);
  *j.out += *(volatile uint64_t*)(j.memory + HALF) != ((uint64_t)from << 40 | 11);
  for (int i = 1; i <= j.rounds; i++) {
    gin.put(world, to, j.win, HALF + 4096, j.win, 64, 256, ncclGin_None{}, ncclGin_CounterInc{3});
    gin.waitCounter(ncclCoopThread(), 3, i);
    *j.out += gin.readCounter(3) != i;
  }
  gin.flush(ncclCoopThread());
}

// Rank 0 and rank 1 answer each other's signals; with bytes, each comes behind a put.
__global__ void ping_pong(Job j, int signal) {
  ncclGin gin{j.comm, 0};
  int me = j.comm.rank, peer = me ^ 1;
  if (threadIdx.x || me > 1 || j.comm.nRanks < 2) return;
  unsigned long long begin = 0;
  for (int i = 0; i < j.rounds; i++) {
    if (i == j.rounds / 10) begin = now();
    if (me == 1) gin.waitSignal(ncclCoopThread(), signal, i + 1);
    if (j.bytes)
      gin.put(ncclTeamWorld(j.comm), peer, j.win, HALF, j.win, 0, j.bytes, ncclGin_SignalInc{(unsigned)signal});
    else
      gin.signal(ncclTeamWorld(j.comm), peer, ncclGin_SignalInc{(unsigned)signal});
    if (me == 0) gin.waitSignal(ncclCoopThread(), signal, i + 1);
  }
  j.out[1] = (now() - begin) / (2 * (j.rounds - j.rounds / 10));
}

// 8-byte puts with a signal each, a context a block.
__global__ void hammer(Job j) {
  ncclGin gin{j.comm, (int)blockIdx.x};
  int to = (j.comm.rank + 1) % j.comm.nRanks;
  unsigned long long begin = now();
  size_t at = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
  for (int i = 0; i < j.rounds; i++) gin.put(ncclTeamWorld(j.comm), to, j.win, HALF + at, j.win, at, 8, ncclGin_SignalInc{12});
  __syncthreads();
  unsigned long long want = (unsigned long long)j.rounds * blockDim.x;
  gin.waitSignal(ncclCoopCta(), 12, want);
  gin.flush(ncclCoopCta());
  if (threadIdx.x == 0) {
    atomicAdd(j.out, gin.readSignal(12) != want);
    atomicMax(j.out + 1, now() - begin);
  }
}

static pthread_barrier_t together;
static ncclUniqueId id;
static int failures;

template <typename Launch>
static unsigned long long run(ncclComm_t comm, int rank, cudaStream_t stream, Job& job, const char* name, int rounds, size_t bytes, Launch launch) {
  job.rounds = rounds, job.bytes = bytes;
  job.out[0] = job.out[1] = 0;
  pthread_barrier_wait(&together);
  launch(job);
  CUDA(cudaGetLastError());
  auto begin = std::chrono::steady_clock::now();
  while (cudaStreamQuery(stream) == cudaErrorNotReady) {
    ncclResult_t async = ncclSuccess;
    NCCL(ncclCommGetAsyncError(comm, &async));
    bool late = std::chrono::steady_clock::now() - begin > std::chrono::seconds(20);
    if (async != ncclSuccess || late) {
      fprintf(stderr, "FAILED %s: rank %d: %s\n", name, rank, late ? "the kernel does not end" : ncclGetErrorString(async));
      _exit(3);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  CUDA(cudaStreamSynchronize(stream));
  pthread_barrier_wait(&together);
  if (job.out[0]) {
    __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);
    printf("FAILED %s: rank %d: %llu wrong\n", name, rank, job.out[0]);
  } else if (rank == 0) {
    printf("ok %s\n", name);
  }
  fflush(stdout);
  return job.out[1];
}

static void body(int rank, int ranks) {
  int gpus = 0;
  CUDA(cudaGetDeviceCount(&gpus));
  if (rank == 0) NCCL(ncclGetUniqueId(&id));
  pthread_barrier_wait(&together);
  CUDA(cudaSetDevice(rank % gpus));
  ncclComm_t comm;
  NCCL(ncclCommInitRank(&comm, ranks, id, rank));
  void* memory;
  NCCL(ncclMemAlloc(&memory, WINDOW));
  Job job{};
  NCCL(ncclCommWindowRegister(comm, memory, WINDOW, &job.win, NCCL_WIN_COLL_SYMMETRIC));
  job.memory = (char*)memory;
  ncclDevCommRequirements needs{};
  needs.ginForceEnable = true;
  needs.ginContextCount = CONTEXTS;
  needs.ginSignalCount = 16;
  needs.ginCounterCount = 4;
  NCCL(ncclDevCommCreate(comm, &needs, &job.comm));
  cudaStream_t s;
  CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  CUDA(cudaHostAlloc((void**)&job.out, 64, cudaHostAllocMapped | cudaHostAllocPortable));
  auto go = [&](const char* name, int rounds, size_t bytes, auto launch) { return run(comm, rank, s, job, name, rounds, bytes, launch); };
  int version = 0;
  NCCL(ncclGetVersion(&version));
  if (rank == 0) printf("NCCL %d, ranks %d, GPUs %d\n", version, ranks, gpus);
  go("all-to-all, 4 KiB", 50, 4096, [=](Job j) { all_to_all<<<1, 64, 0, s>>>(j); });
  go("put value, counters", 20, 0, [=](Job j) { values_and_counters<<<1, 32, 0, s>>>(j); });
  unsigned long long ns = go("puts with a signal, a context a block", 500, 0, [=](Job j) { hammer<<<CONTEXTS, 32, 0, s>>>(j); });
  if (rank == 0 && ns) printf("rate put 8 B + signal, 4 blocks: %.3f M/s a rank\n", 500.0 * 32 * CONTEXTS * 1e3 / ns);
  int signal = 4;
  if (ranks > 1)
    for (size_t bytes : {0ul, 8ul, 65536ul, 1ul << 20}) {
      char name[64];
      snprintf(name, sizeof name, bytes ? "ping-pong, %zu B and a signal" : "ping-pong, a signal", bytes);
      int word = signal++;
      ns = go(name, bytes > 65536 ? 100 : 1000, bytes, [=](Job j) { ping_pong<<<1, 32, 0, s>>>(j, word); });
      if (rank == 0) printf("half round trip %s: %.2f us\n", name, ns / 1e3);
    }
  NCCL(ncclDevCommDestroy(comm, &job.comm));
  NCCL(ncclCommWindowDeregister(comm, job.win));
  NCCL(ncclMemFree(memory));
  pthread_barrier_wait(&together);
  NCCL(ncclCommFinalize(comm));
  NCCL(ncclCommDestroy(comm));
}

int main(int argc, char** argv) {
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  int ranks = argc > 1 ? atoi(argv[1]) : 2;
  pthread_barrier_init(&together, nullptr, ranks);
  std::vector<std::thread> all;
  for (int r = 0; r < ranks; r++) all.emplace_back(body, r, ranks);
  for (auto& t : all) t.join();
  printf(failures ? "%d check(s) FAILED\n" : "all checks passed\n", failures);
  return failures ? 1 : 0;
}
