// What two GPUs of one host can do without NCCL and without Doorbell, for the rows beside theirs:
//
//     floor      prints "floor NAME: FIGURE" lines: copy engine, a CPU in between, and NVLink (or whatever connects the GPUs)
//
// With one GPU it prints what needs only one. Exit status 0, or 1 if CUDA failed.
#include <cuda_runtime.h>
#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#define CUDA(call)                                                                                          \
  do {                                                                                                      \
    cudaError_t e = (call);                                                                                 \
    if (e != cudaSuccess) fprintf(stderr, "FAILED %s: %s\n", #call, cudaGetErrorString(e)), exit(1);        \
  } while (0)

static double seconds(clockid_t clock = CLOCK_MONOTONIC) {
  timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

__device__ unsigned long long peek(const unsigned long long* at) {
  unsigned long long v;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
  return v;
}

__device__ void poke(unsigned long long* at, unsigned long long v) { asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory"); }

// Waits for its word, answers into another: over NVLink if the other is a peer's, through the CPU if it is pinned memory.
__global__ void answer(unsigned long long* mine, unsigned long long* theirs, int rounds, int first) {
  for (int i = 1; i <= rounds; i++) {
    if (first) poke(theirs, i);
    while (peek(mine) < i) {
    }
    if (!first) poke(theirs, i);
  }
}

// 8-byte stores into the peer's memory with an atomic on a word of it behind each.
__global__ void stores(unsigned long long* data, unsigned long long* word, int rounds) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  for (int i = 0; i < rounds; i++) {
    data[at] = i;
    __threadfence_system();
    atomicAdd_system(word, 1ull);
  }
}

struct Gpu {
  int id;
  cudaStream_t stream, copies;
  unsigned long long* words;   // device: polled by `answer`
  unsigned long long* pinned;  // host: what it says
  char* buffer;
};

constexpr size_t BYTES = 64 << 20;

static Gpu make(int id) {
  Gpu g{id};
  CUDA(cudaSetDevice(id));
  CUDA(cudaStreamCreateWithFlags(&g.stream, cudaStreamNonBlocking));
  CUDA(cudaStreamCreateWithFlags(&g.copies, cudaStreamNonBlocking));
  CUDA(cudaMalloc(&g.words, 4096));
  CUDA(cudaMemset(g.words, 0, 4096));
  CUDA(cudaMalloc(&g.buffer, BYTES));
  CUDA(cudaHostAlloc(&g.pinned, 4096, cudaHostAllocMapped | cudaHostAllocPortable));
  memset(g.pinned, 0, 4096);
  CUDA(cudaDeviceSynchronize());
  return g;
}

int main() {
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  int gpus = 0;
  CUDA(cudaGetDeviceCount(&gpus));
  Gpu a = make(0), b = make(gpus > 1 ? 1 : 0);
  constexpr int N = 2000;
  const char* pair = gpus > 1 ? "two GPUs" : "one GPU";

  // Each GPU answers into pinned memory; the CPU carries the answer to the other's word by its copy engine.
  CUDA(cudaSetDevice(a.id));
  answer<<<1, 1, 0, a.stream>>>(a.words, a.pinned, N, 1);
  CUDA(cudaSetDevice(b.id));
  answer<<<1, 1, 0, b.stream>>>(b.words, b.pinned, N, 0);
  double begin = 0, cpu = 0;
  for (int i = 1; i <= N; i++) {
    if (i == N / 10) begin = seconds(), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
    for (auto [from, to] : {std::pair<Gpu*, Gpu*>{&a, &b}, {&b, &a}}) {
      while (__atomic_load_n(from->pinned, __ATOMIC_ACQUIRE) < (unsigned long long)i) {
      }
      to->pinned[8 + i % 256] = i;  // a slot that no copy under way reads
      CUDA(cudaMemcpyAsync(to->words, to->pinned + 8 + i % 256, 8, cudaMemcpyHostToDevice, to->copies));
    }
  }
  CUDA(cudaStreamSynchronize(a.stream));
  CUDA(cudaStreamSynchronize(b.stream));
  double wall = seconds() - begin;
  printf("floor half round trip of a word in GPU memory through a CPU and the copy engine, %s: %.2f us; %.2f cores\n", pair,
         wall / (2 * (N - N / 10)) * 1e6, (seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu) / wall);
  if (gpus < 2) return 0;

  // Without it CUDA takes what follows by way of host memory.
  int reach = 0;
  CUDA(cudaDeviceCanAccessPeer(&reach, 0, 1));
  if (reach) {
    CUDA(cudaSetDevice(1));
    CUDA(cudaDeviceEnablePeerAccess(0, 0));
    CUDA(cudaSetDevice(0));
    CUDA(cudaDeviceEnablePeerAccess(1, 0));
  } else {
    printf("floor: the GPUs do not reach each other: copies go by way of the host\n");
  }
  CUDA(cudaSetDevice(0));
  auto timed = [&](auto what, int rounds) {
    for (int i = 0; i < rounds / 10 + 1; i++) what();
    CUDA(cudaStreamSynchronize(a.copies));
    double begin = seconds();
    for (int i = 0; i < rounds; i++) what();
    CUDA(cudaStreamSynchronize(a.copies));
    return (seconds() - begin) / rounds;
  };
  double one = timed(
    [&] {
      CUDA(cudaMemcpyPeerAsync(b.buffer, 1, a.buffer, 0, 8, a.copies));
      CUDA(cudaStreamSynchronize(a.copies));
    },
    1000);
  printf("floor 8 B from GPU to GPU by the copy engine, one at a time: %.2f us\n", one * 1e6);
#if CUDART_VERSION >= 13000
  std::vector<void*> dst(256);
  std::vector<const void*> src(256);
  std::vector<size_t> size(256, 8);
  for (int i = 0; i < 256; i++) dst[i] = b.buffer + 64 * i, src[i] = a.buffer + 64 * i;
  cudaMemcpyAttributes how{};
  how.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;
  double batch = timed([&] { CUDA(cudaMemcpyBatchAsync(dst.data(), src.data(), size.data(), 256, &how, &first, 1, a.copies)); }, 200);
  printf("floor 8 B from GPU to GPU by the copy engine, batches of 256: %.3f M/s\n", 256 / batch * 1e-6);
#endif
  for (size_t bytes : {1ul << 16, 1ul << 20, 4ul << 20, 16ul << 20}) {
    double each = timed([&] { CUDA(cudaMemcpyPeerAsync(b.buffer, 1, a.buffer, 0, bytes, a.copies)); }, 300);
    printf("floor copies of %zu B from GPU to GPU: %.1f GB/s\n", bytes, bytes / each * 1e-9);
  }

  if (!reach) return 0;
  for (int rounds : {100, 20000}) {
    CUDA(cudaSetDevice(0));
    CUDA(cudaMemset(a.words, 0, 8));
    CUDA(cudaSetDevice(1));
    CUDA(cudaMemset(b.words, 0, 8));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaSetDevice(0));
    CUDA(cudaDeviceSynchronize());
    begin = seconds();
    answer<<<1, 1, 0, a.stream>>>(a.words, b.words, rounds, 1);
    CUDA(cudaSetDevice(1));
    answer<<<1, 1, 0, b.stream>>>(b.words, a.words, rounds, 0);
    CUDA(cudaStreamSynchronize(a.stream));
    CUDA(cudaStreamSynchronize(b.stream));
    if (rounds > 100) printf("floor half round trip of a word over NVLink: %.2f us\n", (seconds() - begin) / (2 * rounds) * 1e6);
  }
  CUDA(cudaSetDevice(0));
  for (int rounds : {10, 2000}) {
    begin = seconds();
    stores<<<4, 32, 0, a.stream>>>((unsigned long long*)b.buffer, b.words, rounds);
    CUDA(cudaStreamSynchronize(a.stream));
    if (rounds > 10) printf("floor 8 B and an atomic over NVLink, 4 blocks of 32 threads: %.3f M/s\n", 128.0 * rounds / (seconds() - begin) * 1e-6);
  }
}
