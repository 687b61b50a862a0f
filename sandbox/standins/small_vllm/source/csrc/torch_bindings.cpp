// The module: an importable one whose `kernels()` says how many the units carry, without launching any.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#define UNITS(X) X(activation) X(cache) X(copy) X(layernorm) X(pos_encoding) X(quant) X(sampler) X(scaled_mm)
#define DECLARE(name) extern "C" int name(void*, const void*);
UNITS(DECLARE)

static int (*const units[])(void*, const void*) = {
#define NAME(name) name,
    UNITS(NAME)};

static PyObject* count(PyObject*, PyObject*) { return PyLong_FromLong(sizeof(units) / sizeof(*units)); }

static PyMethodDef methods[] = {{"units", count, METH_NOARGS, "Compile units in this module."}, {}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C_stable_libtorch", nullptr, -1, methods};

PyMODINIT_FUNC PyInit__C_stable_libtorch() { return PyModule_Create(&module); }
