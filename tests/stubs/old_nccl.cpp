// An old libnccl: it has a version, and lacks later functions.
extern "C" int ncclGetVersion(int* version) {
  *version = 2708;  // 2.7.8
  return 0;
}
