// NCCL's own kernels over GIN: reduce-scatters of symmetric windows, by the kernel that NCCL itself chooses, compared word by word.
//
//     symmetric [RANKS] [threads|processes]     with NCCL_LSA_TEAM_SIZE=1 each rank is a team of its own, so that all of it goes over GIN
//                                               (NCCL_DEBUG_SUBSYS=TUNING says which kernel: "Kernel ReduceScatter_RailA2A_LsaLD")
//
// NCCL 2.30 has three such kernels. Two are for reduce-scatters, of sums and averages of float types up to 32 bits alone (integers go by a ring), the
// second of them and the one for all-gathers only where teams have more than two ranks and NVLink multicast. There is none for all-reduces.
#include <cuda_bf16.h>

#include "ranks.h"

constexpr size_t MOST = 8 << 20;  // elements of a rank's part

// Small whole numbers: their sums over 8 ranks are exact in 8 bits of mantissa, so the order of additions does not matter.
__host__ __device__ int number(int from, size_t i, int round) { return int((i * 7 + from * 11 + round * 13) % 31); }

template <typename T>
__global__ void fill(T* to, size_t count, int rank, int round) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x) to[i] = T(float(number(rank, i, round)));
}

// Part `rank` of the sums, each divided by `share`.
template <typename T>
__global__ void compare(const T* got, size_t count, int rank, int ranks, int round, int share, unsigned long long* out) {
  unsigned long long wrong = 0;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x) {
    int sum = 0;
    for (int r = 0; r < ranks; r++) sum += number(r, rank * count + i, round);
    wrong += float(got[i]) != float(T(float(sum) * (1.0f / share)));
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

struct Rank {
  ncclComm_t comm;
  cudaStream_t stream;
  int rank, ranks;
  Job job;
};

// Reduce-scatters whose every result is compared, then as many by themselves against the clock.
template <typename T>
static void scatter(Rank& r, const char* type, ncclDataType_t code, ncclRedOp_t op, size_t count, int rounds) {
  T *in = (T*)r.job.memory, *out = (T*)(r.job.memory + r.job.size / 2);
  int share = op == ncclAvg ? r.ranks : 1;
  char name[80];
  snprintf(name, sizeof name, "reduce-scatter of %zu B a rank, %s of %s", count * sizeof(T), op == ncclAvg ? "averages" : "sums", type);
  run(r.comm, r.stream, r.rank, r.job, name, rounds, count * sizeof(T), [&](Job& j) {
    for (int round = 0; round < j.rounds; round++) {
      fill<<<64, 256, 0, r.stream>>>(in, r.ranks * count, r.rank, round);
      NCCL(ncclReduceScatter(in, out, count, code, op, r.comm, r.stream));
      compare<<<64, 256, 0, r.stream>>>(out, count, r.rank, r.ranks, round, share, j.out);
    }
  });
  together();
  double begin = seconds(), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
  for (int round = 0; round < rounds; round++) NCCL(ncclReduceScatter(in, out, count, code, op, r.comm, r.stream));
  finish(r.comm, r.stream, r.rank, name, r.job.out);
  double took = seconds() - begin;
  cpu = seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
  if (r.rank == 0) printf("time %s: %.1f us, %.3f GB/s; %.2f cores\n", name, took / rounds * 1e6, count * sizeof(T) * rounds / took * 1e-9, cpu / took);
  fflush(stdout);
}

static void body(int rank, int ranks) {
  Rank r{meet_ranks(rank, ranks), nullptr, rank, ranks, {}};
  r.job.size = 2 * ranks * MOST * sizeof(float);
  ncclWindow_t win;
  NCCL(ncclMemAlloc((void**)&r.job.memory, r.job.size));
  NCCL(ncclCommWindowRegister(r.comm, r.job.memory, r.job.size, &win, NCCL_WIN_COLL_SYMMETRIC));
  CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
  CUDA(cudaHostAlloc((void**)&r.job.out, 64, cudaHostAllocMapped | cudaHostAllocPortable));
  scatter<float>(r, "float32", ncclFloat32, ncclSum, 64, 200);
  scatter<float>(r, "float32", ncclFloat32, ncclSum, 4096, 200);
  scatter<float>(r, "float32", ncclFloat32, ncclSum, 1 << 18, 20);
  scatter<float>(r, "float32", ncclFloat32, ncclSum, MOST, 3);
  // A part that no chunk divides.
  scatter<float>(r, "float32", ncclFloat32, ncclAvg, 100003, 20);
  scatter<__nv_bfloat16>(r, "bfloat16", ncclBfloat16, ncclSum, 1 << 18, 20);
  NCCL(ncclCommWindowDeregister(r.comm, win));
  NCCL(ncclMemFree(r.job.memory));
  together();
  NCCL(ncclCommFinalize(r.comm));
  NCCL(ncclCommDestroy(r.comm));
}

int main(int argc, char** argv) { return start(argc, argv, body); }
