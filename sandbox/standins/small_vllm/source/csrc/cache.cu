#include "kernels.cuh"

extern "C" int cache(void* out, const void* in) {
  return launch<float, 64, 8, 1>(out, in) + launch<double, 32, 8, 1>(out, in);
}
