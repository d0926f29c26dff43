//! What needs a second process: sharing memory, forking, a kernel that faults.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;

use doorbell_gpu::{Dims, Export, Gpu, GpuError, MemKind};

use crate::{LONG, Outcome, ensure, launch, open, read_u64};

const LEN: usize = 100_000;

/// A child opens what we export, checks it with the CPU and writes to it with a kernel.
pub(crate) fn ipc(gpu: &Gpu) -> Outcome {
    let mut done = Vec::new();
    for kind in [MemKind::Device, MemKind::Vmm] {
        let can = if kind == MemKind::Vmm {
            gpu.info().can.vmm_fd
        } else {
            gpu.info().can.ipc
        };
        if !can {
            println!("INFO {kind} memory cannot be exported here");
            continue;
        }
        let buffer = gpu.alloc(kind, LEN)?;
        buffer.fill(0x42)?;
        let export = buffer.export()?;
        let mut child = Command::new(std::env::current_exe()?);
        child.arg("--child");
        match &export {
            Export::CudaIpc { handle, len } => {
                let hex: String = handle.iter().map(|b| format!("{b:02x}")).collect();
                child.args(["ipc", &hex, &len.to_string()]);
            }
            Export::Fd { fd, len } => {
                // The child inherits it.
                rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
                child.args(["fd", &fd.as_raw_fd().to_string(), &len.to_string()]);
            }
        }
        let status = child.status()?;
        ensure!(status.success(), "{kind}: the child ended with {status}");
        ensure!(
            read_u64(&buffer, 1)? == 0xfeed,
            "{kind}: the child's store is not here"
        );
        done.push(kind.to_string());
    }
    ensure!(!done.is_empty(), "nothing can be exported on this GPU");
    Ok(done.join(", "))
}

/// In a forked child every call says that it is one.
pub(crate) fn fork(gpu: &Gpu) -> Outcome {
    // SAFETY: the child makes calls that end in a check of ours and leaves without destructors.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let told = matches!(gpu.alloc(MemKind::Device, 8), Err(GpuError::Forked));
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!told)) };
    }
    let mut status = 0;
    // SAFETY: our child and an out parameter.
    let waited = unsafe { libc::waitpid(child, &mut status, 0) };
    ensure!(
        waited == child && status == 0,
        "the child was not told (status {status})"
    );
    let buffer = gpu.alloc(MemKind::Device, 8)?;
    buffer.write(0, &[1; 8])?;
    Ok("told in the child, works on in the parent".into())
}

/// A fault is an error of the launch, in a process of its own since it takes the context with it.
pub(crate) fn fault(_: &Gpu) -> Outcome {
    let output = Command::new(std::env::current_exe()?)
        .args(["--child", "fault"])
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    ensure!(
        output.status.success(),
        "the child ended with {}: {text}",
        output.status
    );
    Ok(text)
}

/// The child's side; the exit status.
pub(crate) fn child(args: &[String]) -> i32 {
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    let outcome = match args[..] {
        ["ipc", hex, len] => opened(from_hex(hex), len),
        ["fd", fd, len] => opened(from_fd(fd), len),
        ["fault"] => faulted(),
        _ => Err("what should this child do?".into()),
    };
    match outcome {
        Ok(text) => {
            println!("{text}");
            0
        }
        Err(error) => {
            println!("{error}");
            3
        }
    }
}

fn from_hex(hex: &str) -> Result<Export, Box<dyn std::error::Error>> {
    let mut handle = [0; 64];
    for (i, byte) in handle.iter_mut().enumerate() {
        *byte = u8::from_str_radix(hex.get(i * 2..i * 2 + 2).ok_or("a short handle")?, 16)?;
    }
    Ok(Export::CudaIpc { handle, len: 0 })
}

fn from_fd(fd: &str) -> Result<Export, Box<dyn std::error::Error>> {
    // SAFETY: the parent left it open for us.
    let fd = unsafe { OwnedFd::from_raw_fd(fd.parse()?) };
    Ok(Export::Fd { fd, len: 0 })
}

fn opened(export: Result<Export, Box<dyn std::error::Error>>, length: &str) -> Outcome {
    let mut export = export?;
    let (Export::CudaIpc { len, .. } | Export::Fd { len, .. }) = &mut export;
    *len = length.parse()?;
    let gpu = open()?;
    let buffer = gpu.import(&export)?;
    let mut bytes = vec![0; LEN];
    buffer.read(0, &mut bytes)?;
    ensure!(
        bytes.iter().all(|&b| b == 0x42),
        "the child sees other bytes"
    );
    let at = buffer.device_addr() + 8;
    launch(&gpu, &gpu.kernel("store")?, Dims::new(1, 1), &[at, 0xfeed])?.wait(LONG)?;
    Ok("INFO opened in a child".into())
}

fn faulted() -> Outcome {
    let gpu = open()?;
    let mut launched = launch(&gpu, &gpu.kernel("fault")?, Dims::new(1, 1), &[16])?;
    let error = match launched.wait(LONG) {
        Err(error @ GpuError::Driver { .. }) => error.to_string(),
        other => return Err(format!("a fault gave {other:?}").into()),
    };
    let copier = gpu.copier().ok_or("no copier")?;
    // SAFETY: no bytes.
    let after = unsafe { copier.submit(&[]) }.and_then(|ticket| copier.wait(ticket, LONG));
    ensure!(after.is_err(), "copies go on in a lost context");
    ensure!(
        gpu.alloc(MemKind::Device, 8).is_err(),
        "memory is given out in a lost context"
    );
    Ok(error)
}
