// What the kernels of gin.cu and of gin28.cu put, and the clock that they time it by.
#pragma once
#include <cstddef>
#include <cstdint>

__device__ unsigned long long now() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// What word `i` of rank `from` is, in a run that is told from others by its `salt`; never 0.
__device__ uint64_t word_of(int from, size_t i, size_t salt) { return ((i + 1) * 0x9e3779b97f4a7c15ull) ^ ((uint64_t)(from + 1) << 56) ^ salt; }

__device__ char byte_of(int from, int to, size_t i, int round) { return char(i * 7 + from * 31 + to * 101 + round * 13 + (i >> 8)); }
