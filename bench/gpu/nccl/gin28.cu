// The device interface of NCCL 2.28.7 to 2.29, as PyTorch's wheels carry it: checks, then half round trips and rates.
//
//     gin28 [RANKS] [threads|processes] [MODE]     a GPU a rank; MODE: checks (default), fault, killed, stopped, as for gin.cu
//
// What arrives is compared, in the rates too.
//
// Exit status: 0, 1 a check failed, 3 a kernel did not end or NCCL reported an asynchronous error.
#include <nccl_device.h>

#include "ranks.h"
#include "words.cuh"

constexpr int CONTEXTS = 4;
constexpr size_t WINDOW = 8 << 20, HALF = WINDOW / 2;

struct Job {
  ncclWindow_t win;
  ncclDevComm comm;
  char* memory;
  size_t size;
  unsigned long long* out;
  int rounds;
  size_t bytes;
};

// Every rank puts to every rank with a signal. Two halves in turn: a rank may be one round ahead, and no more. Each half has a signal of its own: with one
// for both, a rank's next put could make up the number before another's of this round has come.
__global__ void all_to_all(Job j) {
  ncclGin gin{j.comm, 0};
  int me = j.comm.rank, ranks = j.comm.nRanks;
  unsigned long long wrong = 0;
  for (int round = 1; round <= j.rounds; round++) {
    size_t half = round % 2 * ranks * j.bytes;
    unsigned signal = 14 + round % 2;
    for (int r = 0; r < ranks; r++)
      for (size_t i = threadIdx.x; i < j.bytes; i += blockDim.x) j.memory[half + r * j.bytes + i] = byte_of(me, r, i, round);
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x < ranks)
      gin.put(ncclTeamWorld(j.comm), threadIdx.x, j.win, HALF + half + me * j.bytes, j.win, half + threadIdx.x * j.bytes, j.bytes, ncclGin_SignalInc{signal});
    gin.waitSignal(ncclCoopCta(), signal, (unsigned long long)((round + 1) / 2) * ranks);
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

__device__ volatile uint64_t* words(const Job& j, size_t at) { return (volatile uint64_t*)(j.memory + at); }

// Rank 0 and rank 1 answer each other's signals. With bytes, each comes behind a put, whose first and last word the receiver looks at before it answers.
__global__ void ping_pong(Job j, int signal) {
  ncclGin gin{j.comm, 0};
  int me = j.comm.rank, peer = me ^ 1;
  if (threadIdx.x || me > 1 || j.comm.nRanks < 2) return;
  unsigned long long begin = 0, wrong = 0;
  size_t last = j.bytes / 8 - 1;
  auto receive = [&](int i) {
    gin.waitSignal(ncclCoopThread(), signal, i + 1);
    if (j.bytes) wrong += words(j, HALF)[0] != word_of(peer, 0, i) || words(j, HALF)[last] != word_of(peer, last, i);
  };
  for (int i = 0; i < j.rounds; i++) {
    if (i == j.rounds / 10) begin = now();
    if (me == 1) receive(i);
    if (j.bytes) {
      words(j, 0)[0] = word_of(me, 0, i), words(j, 0)[last] = word_of(me, last, i);
      __threadfence_system();
      gin.put(ncclTeamWorld(j.comm), peer, j.win, HALF, j.win, 0, j.bytes, ncclGin_SignalInc{(unsigned)signal});
    } else {
      gin.signal(ncclTeamWorld(j.comm), peer, ncclGin_SignalInc{(unsigned)signal});
    }
    if (me == 0) receive(i);
  }
  j.out[0] += wrong;
  j.out[1] = (now() - begin) / (2 * (j.rounds - j.rounds / 10));
}

// 8-byte puts with a signal each, a context a block; each word has a place of its own, and when the signals say that all have come it must be there.
__global__ void hammer(Job j) {
  ncclGin gin{j.comm, (int)blockIdx.x};
  int ranks = j.comm.nRanks, to = (j.comm.rank + 1) % ranks, from = (j.comm.rank + ranks - 1) % ranks;
  size_t each = blockDim.x * (size_t)j.rounds, first = each * blockIdx.x;
  for (size_t i = threadIdx.x; i < each; i += blockDim.x) words(j, 0)[first + i] = word_of(j.comm.rank, first + i, 0);
  __threadfence_system();
  __syncthreads();
  unsigned long long begin = now(), wrong = 0;
  for (int i = 0; i < j.rounds; i++) {
    size_t at = 8 * (first + threadIdx.x * (size_t)j.rounds + i);
    gin.put(ncclTeamWorld(j.comm), to, j.win, HALF + at, j.win, at, 8, ncclGin_SignalInc{12});
  }
  __syncthreads();
  gin.waitSignal(ncclCoopCta(), 12, each);
  gin.flush(ncclCoopCta());
  for (size_t i = threadIdx.x; i < each; i += blockDim.x) wrong += words(j, HALF)[first + i] != word_of(from, first + i, 0);
  if (threadIdx.x == 0) {
    wrong += gin.readSignal(12) != each;
    atomicMax(j.out + 1, now() - begin);
  }
  atomicAdd(j.out, wrong);
}

// Puts with signals, and then a wait for what nobody sends.
__global__ void stuck(Job j) {
  ncclGin gin{j.comm, 0};
  if (threadIdx.x) return;
  for (int i = 0; i < j.rounds; i++) gin.put(ncclTeamWorld(j.comm), (j.comm.rank + 1) % j.comm.nRanks, j.win, HALF, j.win, 0, 8, ncclGin_SignalInc{2});
  gin.waitSignal(ncclCoopThread(), 3, 1000000);
}

static void body(int rank, int ranks) {
  ncclComm_t comm = meet_ranks(rank, ranks);
  void* memory;
  NCCL(ncclMemAlloc(&memory, WINDOW));
  Job job{};
  NCCL(ncclCommWindowRegister(comm, memory, WINDOW, &job.win, NCCL_WIN_COLL_SYMMETRIC));
  job.memory = (char*)memory;
  job.size = WINDOW;
  ncclDevCommRequirements needs{};
  needs.ginForceEnable = true;
  needs.ginContextCount = CONTEXTS;
  needs.ginSignalCount = 16;
  needs.ginCounterCount = 4;
  NCCL(ncclDevCommCreate(comm, &needs, &job.comm));
  cudaStream_t s;
  CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  CUDA(cudaHostAlloc((void**)&job.out, 64, cudaHostAllocMapped | cudaHostAllocPortable));
  auto go = [&](const char* name, int rounds, size_t bytes, auto launch) { return run(comm, s, rank, job, name, rounds, bytes, launch); };
  if (!is_mode("checks")) {
    job.rounds = is_mode("fault") ? 200 : 1 << 30, job.bytes = 8;
    together();
    if (is_mode("fault"))
      stuck<<<1, 32, 0, s>>>(job);
    else
      ping_pong<<<1, 32, 0, s>>>(job, 4);
    CUDA(cudaGetLastError());
    told(comm, s, rank);
  }
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
  together();
  NCCL(ncclCommFinalize(comm));
  NCCL(ncclCommDestroy(comm));
}

int main(int argc, char** argv) { return start(argc, argv, body); }
