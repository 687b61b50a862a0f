#include "kernels.cuh"

extern "C" int activation(void* out, const void* in) {
  return launch<float, 64, 8, 0>(out, in) + launch<double, 32, 8, 0>(out, in);
}
