// The simulator's side of ptx.cuh: the same names and signatures, for g++. See kernels/ptx/*.cuh for what each one does.
#pragma once

#include "ptx_sim/language.cuh"

#include "ptx_sim/base.cuh"
#include "ptx_sim/barrier.cuh"
#include "ptx_sim/copy.cuh"
#include "ptx_sim/memory.cuh"
#include "ptx_sim/warp.cuh"
#include "ptx_sim/wgmma.cuh"
