// A libnccl that is too old: it knows its version, and lacks what came later.
extern "C" int ncclGetVersion(int* version) {
  *version = 2708;  // 2.7.8
  return 0;
}
