#include "autograd_lite/module.h"
