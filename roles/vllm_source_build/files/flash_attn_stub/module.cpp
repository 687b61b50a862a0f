// A Python module with nothing in it: vllm.vllm_flash_attn wants one to import, and asks for no kernel below 8.0.
#include <Python.h>

#define JOINED(a, b) a##b
#define INIT(name) JOINED(PyInit_, name)
#define QUOTED(name) #name
#define TEXT(name) QUOTED(name)

static PyModuleDef module = {PyModuleDef_HEAD_INIT, TEXT(MODULE_NAME), nullptr, 0, nullptr};

PyMODINIT_FUNC INIT(MODULE_NAME)(void) { return PyModule_Create(&module); }
