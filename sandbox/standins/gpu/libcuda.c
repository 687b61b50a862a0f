/* Stand-in for the CUDA driver library: answers what a host is asked about its card, runs nothing.
 * card.h (generated from cards/<card>.json) holds the facts. */
#include <string.h>
#include "card.h"

typedef int CUresult;
typedef int CUdevice;

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101 };

static int initialized;

CUresult cuInit(unsigned int flags) {
    if (flags != 0) return INVALID_VALUE;
    initialized = 1;
    return SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    if (!version) return INVALID_VALUE;
    *version = CARD_CUDA;
    return SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    if (!count) return INVALID_VALUE;
    if (!initialized) return NOT_INITIALIZED;
    *count = 1;
    return SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (!device) return INVALID_VALUE;
    if (!initialized) return NOT_INITIALIZED;
    if (ordinal != 0) return INVALID_DEVICE;
    *device = 0;
    return SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    if (!name || length < 1) return INVALID_VALUE;
    if (device != 0) return INVALID_DEVICE;
    strncpy(name, CARD_NAME, (size_t)length);
    name[length - 1] = '\0';
    return SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    if (!bytes) return INVALID_VALUE;
    if (device != 0) return INVALID_DEVICE;
    *bytes = (size_t)CARD_MEMORY_MIB << 20;
    return SUCCESS;
}

/* Attribute numbers: CUdevice_attribute of cuda.h. */
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    if (!value) return INVALID_VALUE;
    if (device != 0) return INVALID_DEVICE;
    switch (attribute) {
    case 8: *value = CARD_SHARED; return SUCCESS;
    case 10: *value = 32; return SUCCESS;
    case 16: *value = CARD_MULTIPROCESSORS; return SUCCESS;
    case 75: *value = CARD_MAJOR; return SUCCESS;
    case 76: *value = CARD_MINOR; return SUCCESS;
    case 97: *value = CARD_SHARED_OPTIN; return SUCCESS;
    default: return INVALID_VALUE;
    }
}
