#include "kernels.cuh"

extern "C" int pos_encoding(void* out, const void* in) {
  return launch<float, 64, 8, 4>(out, in) + launch<double, 32, 8, 4>(out, in);
}
