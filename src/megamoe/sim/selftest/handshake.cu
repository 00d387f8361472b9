// Two ranks exchange 128 words a round: write into the peer's buffer, raise the peer's flag, wait for the own one, sum.
//
// `bug` plants one mistake, so that tests can see that the simulator finds it:
//   1 relaxed flag   2 gpu scope   3 one buffer instead of two   4 no barrier before the flag   5 fence with gpu scope
//   6 fence and relaxed flag (right)   7 relaxed load, no fence after it
#include "ptx.cuh"

using ptx::u32;

struct HandshakeArguments {
  u32* own_flag;
  u32* peer_flag;
  const u32* own_buffer;
  u32* peer_buffer;
  u32* result;
  int rank, rounds, bug;
};

MEGAMOE_DEVICE void raise_flag(const HandshakeArguments& p, u32 value) {
  if (p.bug == 1) {
    ptx::st_relaxed_sys(p.peer_flag, value);
  } else if (p.bug == 2) {
    ptx::st_release_gpu(p.peer_flag, value);
  } else if (p.bug == 5) {
    ptx::fence_acq_rel_gpu();
    ptx::st_relaxed_sys(p.peer_flag, value);
  } else if (p.bug == 6) {
    ptx::fence_acq_rel_sys();
    ptx::st_relaxed_sys(p.peer_flag, value);
  } else {
    ptx::st_release_sys(p.peer_flag, value);
  }
}

MEGAMOE_DEVICE void wait_flag(const HandshakeArguments& p, u32 value) {
  if (p.bug == 6 || p.bug == 7) {
    while (ptx::ld_relaxed_sys(p.own_flag) < value) ptx::nanosleep(20);
    if (p.bug == 6) ptx::fence_acq_rel_sys();
  } else {
    while (ptx::ld_acquire_sys(p.own_flag) < value) ptx::nanosleep(20);
  }
}

extern "C" __global__ void __launch_bounds__(128, 1) handshake(const __grid_constant__ HandshakeArguments p) {
  for (int r = 0; r < p.rounds; ++r) {
    const int bank = p.bug == 3 ? 0 : r % 2 * 128;
    p.peer_buffer[bank + threadIdx.x] = static_cast<u32>(p.rank * 1000 + r * 7) + threadIdx.x;
    if (p.bug != 4) __syncthreads();
    if (threadIdx.x == 0) {
      raise_flag(p, static_cast<u32>(r + 1));
      wait_flag(p, static_cast<u32>(r + 1));
    }
    __syncthreads();
    u32 sum = p.own_buffer[bank + threadIdx.x];
    for (int step = 16; step > 0; step /= 2) sum += ptx::shfl_xor(sum, step);
    if (threadIdx.x % 32 == 0) p.result[r * 4 + static_cast<int>(threadIdx.x / 32)] = sum;
  }
}
