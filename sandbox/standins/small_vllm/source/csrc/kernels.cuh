// A kernel whose loops are unrolled whole: what costs nvcc its time in vLLM costs it here.
#pragma once

template <typename T, int Head, int Tile, int Salt>
__global__ void rows(T* out, const T* in, int stride) {
  __shared__ T tile[Tile][Head];
  T sum[Tile];
#pragma unroll
  for (int t = 0; t < Tile; ++t) {
    sum[t] = T(0);
#pragma unroll
    for (int h = 0; h < Head; ++h) {
      const T value = in[(blockIdx.x * Tile + t) * stride + h * blockDim.x + threadIdx.x];
      tile[t][(h + threadIdx.x) % Head] = value * T(Salt + 1);
      sum[t] += value * tile[(t + Salt) % Tile][h];
    }
  }
  __syncthreads();
#pragma unroll
  for (int t = 0; t < Tile; ++t) {
    out[(blockIdx.x * Tile + t) * stride + threadIdx.x] = sum[t] / (T(1) + sum[(t + 1) % Tile]);
  }
}

template <typename T, int Head, int Tile, int Salt>
int launch(void* out, const void* in) {
  rows<T, Head, Tile, Salt><<<1, 32>>>(static_cast<T*>(out), static_cast<const T*>(in), Head);
  return 1;
}
