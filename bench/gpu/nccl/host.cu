// Host-initiated NCCL, for the rows beside its device interface: half round trips and all-to-alls of small messages, each an operation of the host.
//
//     host [RANKS]     a process a rank, a GPU each. The transport is the environment's: NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
//                      NCCL_NET=Socket for sockets, nothing for NVLink or shared memory.
#include "ranks.h"

static void body(int rank, int ranks) {
  if (rank == 0) NCCL(ncclGetUniqueId(&shared->id));
  together();
  CUDA(cudaSetDevice(rank));
  ncclComm_t comm;
  NCCL(ncclCommInitRank(&comm, ranks, shared->id, rank));
  cudaStream_t s;
  CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  char* memory;
  CUDA(cudaMalloc(&memory, 64 << 20));
  auto timed = [&](int rounds, auto what) {
    double begin = 0, cpu = 0;
    for (int part = 0; part < 2; part++) {
      together();
      begin = seconds(), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
      for (int i = 0; i < (part ? rounds : rounds / 10 + 1); i++) what();
      CUDA(cudaStreamSynchronize(s));
    }
    double wall = seconds() - begin;
    return std::pair<double, double>{wall / rounds, (seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu) / wall};
  };
  for (size_t bytes : {8ul, 4096ul, 65536ul, 1ul << 20}) {
    auto [each, cores] = timed(bytes > 65536 ? 100 : 500, [&] {
      if (rank > 1) return;
      for (int turn = 0; turn < 2; turn++)
        if (turn == rank)
          NCCL(ncclSend(memory, bytes, ncclInt8, rank ^ 1, comm, s));
        else
          NCCL(ncclRecv(memory + (32 << 20), bytes, ncclInt8, rank ^ 1, comm, s));
    });
    if (rank == 0) printf("host: half round trip of %zu B: %.2f us; %.2f cores\n", bytes, each / 2 * 1e6, cores);
  }
  auto [each, cores] = timed(500, [&] {
    NCCL(ncclGroupStart());
    for (int r = 0; r < ranks; r++) {
      NCCL(ncclSend(memory + 8 * r, 8, ncclInt8, r, comm, s));
      NCCL(ncclRecv(memory + (32 << 20) + 8 * r, 8, ncclInt8, r, comm, s));
    }
    NCCL(ncclGroupEnd());
  });
  if (rank == 0) printf("host: all-to-all of 8 B: %.2f us a round; %.2f cores\n", each * 1e6, cores);
  fflush(stdout);
  together();
  NCCL(ncclCommDestroy(comm));
}

int main(int argc, char** argv) {
  int ranks = argc > 1 ? atoi(argv[1]) : 2, worst = 0;
  shared = (Shared*)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  pthread_barrierattr_t attributes;
  pthread_barrierattr_init(&attributes);
  pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(&shared->together, &attributes, ranks);
  // Before CUDA is used: it does not survive a fork.
  for (int r = 0; r < ranks; r++)
    if (fork() == 0) {
      body(r, ranks);
      _exit(0);
    }
  for (int r = 0; r < ranks; r++) {
    int status = 0;
    wait(&status);
    if (!WIFEXITED(status) || WEXITSTATUS(status)) worst = 1;
  }
  return worst;
}
