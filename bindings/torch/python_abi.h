// The part of Python's stable ABI that direct calls use, declared here: a build needs no headers of
// Python, and one library serves every version. Weak, because a process may load the operators
// without an interpreter. Objects are handled by functions alone, whatever their structs are.
#pragma once

#include <cstddef>

extern "C" {

struct PyThreadState;
struct PyObject;
using PyFastFunction = PyObject* (*)(PyObject* self, PyObject* const* args, ptrdiff_t count);
struct PyMethodDef {
  const char* name;
  PyFastFunction function;
  int flags;
  const char* doc;
};

#define DELTIC_PYTHON __attribute__((weak))
DELTIC_PYTHON void Py_IncRef(PyObject* x);
DELTIC_PYTHON void Py_DecRef(PyObject* x);
DELTIC_PYTHON void PyErr_Clear();
DELTIC_PYTHON PyObject* PyErr_Occurred();  // borrowed
DELTIC_PYTHON PyObject* PyObject_Type(PyObject* x);
DELTIC_PYTHON PyObject* PyObject_GetAttr(PyObject* x, PyObject* name);
DELTIC_PYTHON PyObject* PyObject_Call(PyObject* f, PyObject* args, PyObject* kwargs);
DELTIC_PYTHON PyObject* PyObject_CallObject(PyObject* f, PyObject* args);
DELTIC_PYTHON PyObject* PyObject_CallFunctionObjArgs(PyObject* f, ...);
DELTIC_PYTHON PyObject* PyTuple_New(ptrdiff_t size);
DELTIC_PYTHON PyObject* PyTuple_GetItem(PyObject* tuple, ptrdiff_t i);  // borrowed
DELTIC_PYTHON ptrdiff_t PyTuple_Size(PyObject* tuple);
DELTIC_PYTHON int PyTuple_SetItem(PyObject* tuple, ptrdiff_t i, PyObject* x);  // takes x
DELTIC_PYTHON PyObject* PyDict_GetItem(PyObject* dict, PyObject* key);         // borrowed
DELTIC_PYTHON PyObject* PyLong_FromLongLong(long long x);
DELTIC_PYTHON long long PyLong_AsLongLong(PyObject* x);
DELTIC_PYTHON void* PyLong_AsVoidPtr(PyObject* x);
DELTIC_PYTHON double PyFloat_AsDouble(PyObject* x);
DELTIC_PYTHON PyObject* PyUnicode_AsUTF8String(PyObject* x);
DELTIC_PYTHON int PyBytes_AsStringAndSize(PyObject* x, char** text, ptrdiff_t* size);
DELTIC_PYTHON void* PyCapsule_GetPointer(PyObject* x, const char* name);
DELTIC_PYTHON PyObject* PyCFunction_NewEx(PyMethodDef* method, PyObject* self, PyObject* module);
DELTIC_PYTHON PyThreadState* PyEval_SaveThread();
DELTIC_PYTHON void PyEval_RestoreThread(PyThreadState* state);
#undef DELTIC_PYTHON

}  // extern "C"
