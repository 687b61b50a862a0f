#include "kernels.cuh"

extern "C" int copy(void* out, const void* in) {
  return launch<float, 64, 8, 2>(out, in) + launch<double, 32, 8, 2>(out, in);
}
