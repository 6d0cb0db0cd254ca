"""The C text of the stub libraries: a function of every wanted name that does nothing and says it went well. Host code.

A few have to do more, or loading or compiling fails; each was found by what failed without it. `_SPECIAL` holds C
functions, `_SHAPES` what the mangled name of a C++ function says about how it returns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

CANN_VERSION = "9.0.0"
"""What the stubs claim to be: MindSpore reads a version's first number when it compiles at level O1."""
SOC_VARIABLE = "MSDS_STUB_SOC"
"""Environment variable with the name of the chip that is claimed, such as Ascend910B3."""

_HEADER = f"""\
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#define CANN "{CANN_VERSION}"
#define SOC_VARIABLE "{SOC_VARIABLE}"
extern char _ZNSs4_Rep20_S_empty_rep_storageE[];  /* the empty std::string of the old ABI */
/* the memory pool asks for tens of GB: address space alone is reserved */
static int reserve(void **p, size_t n) {{
  *p = mmap(0, n ? n : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return *p == MAP_FAILED;
}}
static int handle(void **p) {{ *p = calloc(1, 64); return 0; }}
"""

_SPECIAL = """\
const char *aclrtGetSocName(void) { const char *name = getenv(SOC_VARIABLE); return name ? name : ""; }
int rtGetSocVersion(char *name, unsigned n) { strncpy(name, aclrtGetSocName(), n); return 0; }
int aclGetDeviceCapability(unsigned d, int t, long *v) { *v = 24; return 0; }
int aclrtGetDeviceInfo(unsigned d, int t, long *v) { *v = 24; return 0; }
int rtGetDeviceInfo(unsigned d, int m, int t, long *v) { *v = 24; return 0; }
int aclsysGetCANNVersion(int package, char *v) {
  strcpy(v, CANN); strcpy(v + 128, "9"); strcpy(v + 192, "0"); strcpy(v + 256, "0"); strcpy(v + 320, "0"); return 0; }
int aclrtGetDeviceCount(unsigned *n) { if (n) *n = 16; return 0; }
int aclrtGetDevice(int *d) { if (d) *d = 0; return 0; }
int aclrtGetMemInfo(int a, size_t *f, size_t *t) { if (f) *f = 60ull << 30; if (t) *t = 64ull << 30; return 0; }
int aclrtMalloc(void **p, size_t n) { return reserve(p, n); }
int aclrtMallocAlign32(void **p, size_t n) { return reserve(p, n); }
int aclrtReserveMemAddress(void **p, size_t n) { return reserve(p, n); }
int aclrtMallocHost(void **p, size_t n) { *p = malloc(n ? n : 1); return 0; }
int aclrtFreeHost(void *p) { free(p); return 0; }
int aclrtCreateStream(void **p) { return handle(p); }
int aclrtCreateStreamWithConfig(void **p) { return handle(p); }
int aclrtCreateContext(void **p) { return handle(p); }
int aclrtCreateEventExWithFlag(void **p) { return handle(p); }
int aclrtCreateEventWithFlag(void **p) { return handle(p); }
int aclrtGetCurrentContext(void **p) { static char context[64]; *p = context; return 0; }
int aclrtGetVersion(int *a, int *b, int *c) { if (a) *a = 1; if (b) *b = 15; if (c) *c = 0; return 0; }
const char *aclGetRecentErrMsg(void) { return ""; }
int memcpy_s(void *d, size_t m, const void *s, size_t n) { if (n > m) return 34; memcpy(d, s, n); return 0; }
int memset_s(void *d, size_t m, int c, size_t n) { if (n > m) return 34; memset(d, c, n); return 0; }
"""

# C++ classes of CANN's graph engine that are one shared_ptr, and those with a table of methods before it
_POINTER = "s[0] = s[1] = 0; return s;"
_TABLE_AND_POINTER = f"s[2] = {_POINTER}"
_SHAPES: tuple[tuple[str, str], ...] = (
    (r"_ZT[VIS]\w*|__stack_chk_guard", "char {name}[512];"),
    (r"\w*IsExistOp\w*", "long {name}(void) {{ return 1; }}"),
    # std::string by value
    (
        r"\w*(?:7GetName|9GetOpType)Ev",
        "void *{name}(void **s) {{ *s = _ZNSs4_Rep20_S_empty_rep_storageE + 24; return s; }}",
    ),
    # vectors and Operators by value: three words; the name does not say that the result is written through a pointer
    (
        r"\w*(?:CreateOperator|GetDims|Nodes|NodesAndPortIndexs|GetDirectNode)E\w*",
        f"void *{{name}}(void **s) {{{{ {_TABLE_AND_POINTER} }}}}",
    ),
    (
        r"\w*(?:GetOriginShape|GetShape|GetTensorDesc|GetOutputDesc|GetCompiledGraphSummary)E\w*",
        f"void *{{name}}(void **s) {{{{ {_POINTER} }}}}",
    ),
    # constructors; those of registrars belong to empty classes, whose neighbours must not be written to
    (r"_ZNS?2ge\w*Register\w*C[12]E\w*", "long {name}(void) {{ return 0; }}"),
    (r"_ZNS?2ge8OperatorC[12]E\w*", f"void *{{name}}(void **s) {{{{ {_TABLE_AND_POINTER} }}}}"),
    (r"_ZNS?2ge\w+C[12]E\w*", f"void *{{name}}(void **s) {{{{ {_POINTER} }}}}"),
    # singletons that inline code inserts into: an empty std::map at the front
    (
        r"\w*InstanceEv",
        "void *{name}(void) {{ static void *m[64]; if (!m[3]) m[3] = m[4] = &m[1]; return m; }}",
    ),
    (r"\w+", "long {name}(void) {{ return 0; }}"),
)


def stub_source(symbols: Iterable[str]) -> str:
    """One C file that defines every symbol."""
    special = set(re.findall(r"(\w+)\([^;{]*?\) \{", _SPECIAL))
    lines = [_HEADER, _SPECIAL]
    for name in symbols:
        if name not in special:
            body = next(body for pattern, body in _SHAPES if re.fullmatch(pattern, name))
            lines.append(body.format(name=name))
    return "\n".join(lines) + "\n"
