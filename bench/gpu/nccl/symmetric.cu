// NCCL's own kernels over GIN: reduce-scatters and all-gathers of symmetric windows, with whatever kernel NCCL chooses, compared word by word.
//
//     symmetric [RANKS] [threads|processes]     with NCCL_LSA_TEAM_SIZE=1 each rank is a team of its own, so that all of it goes over GIN
//                                               (NCCL_DEBUG_SUBSYS=TUNING says which kernel: "Kernel ReduceScatter_RailA2A_LsaLD")
#include "ranks.h"

constexpr size_t MOST = 8 << 20;  // words of a rank's part

__host__ __device__ int word_of(int from, size_t i, int round) { return int(i * 7 + from * 1000003 + round * 13); }

__global__ void fill(int* to, size_t count, int rank, int round) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x) to[i] = word_of(rank, i, round);
}

// After a reduce-scatter: part `rank` of the sums. After an all-gather: everybody's part.
__global__ void compare(const int* got, size_t count, int rank, int ranks, int round, bool sums, unsigned long long* out) {
  unsigned long long wrong = 0;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x) {
    if (sums) {
      int want = 0;
      for (int r = 0; r < ranks; r++) want += word_of(r, rank * count + i, round);
      wrong += got[i] != want;
    } else {
      for (int r = 0; r < ranks; r++) wrong += got[r * count + i] != word_of(r, i, round);
    }
  }
  if (wrong) atomicAdd(out, wrong);
}

struct Job {
  char* memory;
  size_t size;
  unsigned long long* out;
  int rounds;
  size_t bytes;
};

static void body(int rank, int ranks) {
  ncclComm_t comm = meet_ranks(rank, ranks);
  size_t size = 2 * ranks * MOST * 4;
  char* memory;
  ncclWindow_t win;
  NCCL(ncclMemAlloc((void**)&memory, size));
  NCCL(ncclCommWindowRegister(comm, memory, size, &win, NCCL_WIN_COLL_SYMMETRIC));
  cudaStream_t s;
  CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  Job job{memory, size};
  CUDA(cudaHostAlloc((void**)&job.out, 64, cudaHostAllocMapped | cudaHostAllocPortable));
  int *in = (int*)memory, *out = (int*)(memory + size / 2);
  for (bool sums : {true, false})
    for (size_t count : {64ul, 4096ul, 1ul << 18, MOST}) {
      char name[64];
      snprintf(name, sizeof name, "%s of %zu B a rank", sums ? "reduce-scatter" : "all-gather", 4 * count);
      double begin = 0;
      run(comm, s, rank, job, name, 5, 4 * count, [&](Job& j) {
        begin = seconds();
        for (int round = 0; round < j.rounds; round++) {
          fill<<<64, 256, 0, s>>>(in, sums ? ranks * count : count, rank, round);
          if (sums)
            NCCL(ncclReduceScatter(in, out, count, ncclInt32, ncclSum, comm, s));
          else
            NCCL(ncclAllGather(in, out, count, ncclInt32, comm, s));
          compare<<<64, 256, 0, s>>>(out, count, rank, ranks, round, sums, j.out);
        }
      });
      if (rank == 0) printf("time %s: %.1f us with filling and comparing; %.2f cores\n", name, (seconds() - begin) / 5 * 1e6, cores);
    }
  NCCL(ncclCommWindowDeregister(comm, win));
  NCCL(ncclMemFree(memory));
  together();
  NCCL(ncclCommFinalize(comm));
  NCCL(ncclCommDestroy(comm));
}

int main(int argc, char** argv) { return start(argc, argv, body); }
