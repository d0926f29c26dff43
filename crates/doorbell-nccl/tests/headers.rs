//! Every size and offset that this crate declares, asked of NCCL's own headers.
//!
//! `DOORBELL_NCCL_HEADERS` names one or more checkouts of NCCL (`:` between them), each at a release that has GIN. A C++ program of
//! assertions is compiled against it; CUDA's headers are not needed, since the few names that NCCL's use are supplied here.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use doorbell_nccl::abi::layouts;

/// What NCCL's headers want of CUDA's.
const CUDA: &str = "#pragma once\n\
    #include <stddef.h>\n\
    typedef struct CUstream_st *cudaStream_t;\n\
    typedef struct CUevent_st *cudaEvent_t;\n\
    typedef unsigned long long CUdeviceptr;\n\
    typedef int cudaError_t;\n\
    #define CUDART_VERSION 0\n\
    #define __host__\n\
    #define __device__\n\
    #define __forceinline__ inline\n";

/// A release as `layouts` counts them, from `makefiles/version.mk`.
fn release(checkout: &Path) -> (u32, [u32; 3]) {
    let text = fs::read_to_string(checkout.join("makefiles/version.mk"))
        .unwrap_or_else(|e| panic!("{} is no checkout of NCCL: {e}", checkout.display()));
    let number = |name: &str| {
        text.lines()
            .find_map(|l| {
                l.strip_prefix(name)?
                    .trim()
                    .strip_prefix(":=")?
                    .trim()
                    .parse()
                    .ok()
            })
            .unwrap_or_else(|| panic!("{name} is not in version.mk"))
    };
    let [major, minor, patch] = ["NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH"].map(number);
    (major * 10000 + minor * 100 + patch, [major, minor, patch])
}

fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    for entry in fs::read_dir(folder).ok()?.flatten() {
        let path = entry.path();
        if path.is_dir() {
            if let Some(found) = find(&path, name) {
                return Some(found);
            }
        } else if entry.file_name() == name {
            return Some(path);
        }
    }
    None
}

/// Compiles the assertions; returns how many structures there were.
fn compare(checkout: &Path) -> usize {
    let (number, [major, minor, patch]) = release(checkout);
    let dir = tempfile::tempdir().expect("a folder");
    let source = checkout.join("src");
    // The build makes nccl.h out of a template.
    let template = fs::read_to_string(source.join("nccl.h.in")).expect("nccl.h.in");
    let header = template
        .replace("${nccl:Major}", &major.to_string())
        .replace("${nccl:Minor}", &minor.to_string())
        .replace("${nccl:Patch}", &patch.to_string())
        .replace("${nccl:Suffix}", "")
        .replace("${nccl:Version}", &number.to_string());
    fs::write(dir.path().join("nccl.h"), header).expect("written");
    for name in [
        "cuda.h",
        "cuda_runtime.h",
        "cuda_fp16.h",
        "cuda_bf16.h",
        "cuda_fp8.h",
    ] {
        fs::write(dir.path().join(name), CUDA).expect("written");
    }
    let queue = find(&source, "doca_gpunetio_verbs_dev.h").expect("the queue pair's header");
    let plugin = |name: &str| source.join("include/plugin").join(name).is_file();

    let mut program = String::from("#include <cstddef>\n#include \"nccl.h\"\n");
    for name in ["nccl_net.h", "nccl_gin.h", "nccl_rma.h"] {
        if plugin(name) {
            writeln!(program, "#include \"{name}\"").expect("a string");
        }
    }
    program.push_str("#include \"nccl_device/gin/gdaki/gin_gdaki_device_host_common.h\"\n");
    writeln!(program, "#include \"{}\"", queue.display()).expect("a string");
    let mut structures = 0;
    for layout in layouts() {
        let (from, to) = layout.releases;
        if !(from..=to).contains(&number) {
            continue;
        }
        structures += 1;
        let (name, size) = (layout.c_name, layout.size);
        writeln!(
            program,
            "static_assert(sizeof({name}) == {size}, \"{name}\");"
        )
        .expect("a string");
        for (field, offset) in layout.fields {
            writeln!(
                program,
                "static_assert(offsetof({name}, {field}) == {offset}, \"{name}.{field}\");"
            )
            .expect("a string");
        }
    }
    let file = dir.path().join("layouts.cc");
    fs::write(&file, program).expect("written");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let output = Command::new(&compiler)
        .args([
            "-std=c++17",
            "-fsyntax-only",
            "-Wno-invalid-offsetof",
            "-DNCCL_OS_LINUX",
        ])
        .arg("-I")
        .arg(dir.path())
        .arg("-I")
        .arg(source.join("include"))
        .arg("-I")
        .arg(source.join("include/plugin"))
        .arg("-I")
        .arg(queue.parent().expect("a folder"))
        .arg("-I")
        .arg(queue.parent().and_then(Path::parent).expect("a folder"))
        .arg(&file)
        .output()
        .unwrap_or_else(|e| panic!("{compiler}: {e}"));
    assert!(
        output.status.success(),
        "NCCL {major}.{minor}.{patch} says otherwise:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    structures
}

#[test]
#[ignore = "needs DOORBELL_NCCL_HEADERS, a checkout of NCCL"]
fn peer_headers() {
    let named = std::env::var("DOORBELL_NCCL_HEADERS")
        .expect("DOORBELL_NCCL_HEADERS names a checkout of NCCL at a release from 2.28.7 on");
    for checkout in named.split(':') {
        // Tests run in their crate's folder; whoever calls them is in the workspace's.
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let structures = compare(&workspace.join(checkout));
        assert!(structures >= 5, "{checkout}: only {structures} structures");
        println!("{checkout}: {structures} structures agree");
    }
}

#[test]
fn no_two_declarations_claim_one_structure_of_one_release() {
    let all = layouts();
    for (i, a) in all.iter().enumerate() {
        for b in &all[i + 1..] {
            let apart = a.releases.1 < b.releases.0 || b.releases.1 < a.releases.0;
            assert!(a.c_name != b.c_name || apart, "{} twice", a.c_name);
        }
        let mut last = None;
        for (name, offset) in &a.fields {
            assert!(*offset < a.size, "{}.{name}", a.c_name);
            assert!(
                last < Some(*offset) || name.contains('.'),
                "{}.{name}",
                a.c_name
            );
            last = last.max(Some(*offset));
        }
    }
}
