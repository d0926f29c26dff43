//! The closed DOCA SDK: whether its GPUNetIO can work here, and who would use it.

use super::gates::{doorbell, gpu, gpu_memory, libcuda, libverbs, mlx5, said};
use super::{library, path, variables};
use crate::facts::{Facts, Found};
use crate::report::{Library, Who};

const SOURCE: &str = "doca-gpunetio (open) 2.0.1 doca_gpunetio_high_level.cpp";

pub(super) fn judge(facts: &Facts, found: &Found) -> Library {
    let gates = vec![
        gpu(facts, 70, SOURCE),
        libcuda(facts, SOURCE),
        mlx5(facts, SOURCE),
        libverbs(facts, false, SOURCE),
        gpu_memory(facts, false, SOURCE),
    ];
    let rung = gates.iter().cloned().chain([doorbell(facts)]).collect();
    let paths = vec![
        path("GPUNetIO, the GPU rings", Who::Native, rung),
        path("GPUNetIO, a CPU thread rings", Who::Assisted, gates),
    ];
    let mut library = library("doca", found, paths);
    library.notes.push(format!(
        "NCCL 2.32 and NVSHMEM 3.8 use this SDK only with DOCA_SDK_LIB_PATH ({}); else their own open copy.",
        said(facts, "DOCA_SDK_LIB_PATH")
    ));
    library.variables = variables(
        facts,
        &[
            (
                "DOCA_SDK_LIB_PATH",
                "folder of libdoca_*.so for NCCL and NVSHMEM",
            ),
            ("DOCA_GPUNETIO_DISABLE_GDRCOPY", "1 does without GDRCopy"),
        ],
    );
    library
}
