//! Two ranks that a launcher started: the same command twice, with the variables that launchers set.
//! The launchers themselves are tried where they are installed, by `peer_mpirun_*`.

mod common;
use common::{Running, doorbell, texts, words};

/// A rank as Open MPI starts it.
fn rank(number: u32, world: u32, job: &str, args: &[&str]) -> Running {
    let mut command = doorbell(args);
    command
        .env("OMPI_COMM_WORLD_RANK", number.to_string())
        .env("OMPI_COMM_WORLD_SIZE", world.to_string())
        .env("OMPI_COMM_WORLD_LOCAL_SIZE", world.to_string())
        .env("PMIX_NAMESPACE", format!("{job}.{}", std::process::id()));
    Running::spawn(command, &format!("rank {number}"))
}

const QUICK: [&str; 6] = [
    "perf",
    "put-bw",
    "--link",
    "shm",
    "--quick",
    "--no-baseline",
];

#[test]
fn two_ranks_find_each_other_and_rank_0_prints() {
    let ranks = [0, 1].map(|n| rank(n, 2, "both", &QUICK));
    let [zero, one] = ranks.map(Running::finish);
    let (out, err) = texts(&zero);
    assert_eq!(zero.status.code(), Some(0), "{out}\n{err}");
    assert!(
        out.contains("none wrong") && out.contains("peer: "),
        "{out}"
    );
    let (out, err) = texts(&one);
    assert_eq!(one.status.code(), Some(0), "{out}\n{err}");
    assert_eq!(out + &err, "", "rank 1 has nothing to say");
}

#[test]
fn a_failed_check_is_in_both_statuses_and_said_once() {
    let args: Vec<_> = QUICK.into_iter().chain(["--sabotage"]).collect();
    let ranks = [0, 1].map(|n| rank(n, 2, "check", &args));
    let [zero, one] = ranks.map(Running::finish);
    assert_eq!(zero.status.code(), Some(3));
    assert_eq!(one.status.code(), Some(3));
    assert!(texts(&zero).1.contains("a check failed"));
    assert_eq!(texts(&one).1, "");
}

#[test]
fn a_rank_that_never_comes_is_named_after_the_time_out() {
    let args: Vec<_> = QUICK.into_iter().chain(["--timeout", "1"]).collect();
    for (present, said) in [(0, "rank(s) [1] of 2"), (1, "rank 0 of 2 was not at unix:")] {
        let job = format!("missing beside {present}");
        let output = rank(present, 2, &job, &args).finish();
        let (out, err) = texts(&output);
        assert_eq!(output.status.code(), Some(1), "{out}\n{err}");
        assert!(err.contains(said), "{err}");
    }
}

#[test]
fn a_rank_that_dies_ends_the_other() {
    let args = words("perf put-lat --link shm --secs 600 --timeout 5");
    for victim in [0usize, 1] {
        let mut ranks = [0, 1].map(|n| Some(rank(n, 2, &format!("dies{victim}"), &args)));
        std::thread::sleep(std::time::Duration::from_millis(1500));
        drop(ranks[victim].take());
        let other = ranks[1 - victim].take().expect("the other rank");
        let output = other.finish();
        let (out, err) = texts(&output);
        assert_eq!(output.status.code(), Some(1), "{out}\n{err}");
        assert!(err.contains("died") || err.contains("gone"), "{err}");
    }
}

#[test]
fn what_cannot_be_launched_is_refused() {
    for (world, args, part) in [
        (3, &["perf", "put-bw", "--link", "shm"][..], "-n 2"),
        (2, &["perf", "put-bw"][..], "--link roce"),
    ] {
        let output = rank(0, world, "refused", args).finish();
        assert_eq!(output.status.code(), Some(2));
        let (_, err) = texts(&output);
        assert!(err.contains(part), "{err}");
    }
}

/// Two ranks under a launcher of the system.
fn mpirun(command: &str, link: &str) {
    let exe = env!("CARGO_BIN_EXE_doorbell");
    let mut shell = std::process::Command::new("sh");
    shell.arg("-c").arg(format!(
        "{command} -n 2 {exe} perf put-bw --link {link} --quick --no-baseline --gpu host"
    ));
    let output = Running::spawn(shell, command).finish();
    let (out, err) = texts(&output);
    assert_eq!(output.status.code(), Some(0), "{command}: {out}\n{err}");
    assert_eq!(out.matches("none wrong").count(), 1, "{command}: {out}");
}

#[test]
#[ignore = "needs PEER openmpi-bin"]
fn peer_mpirun_of_openmpi() {
    mpirun("mpirun.openmpi --allow-run-as-root --oversubscribe", "roce");
    mpirun("mpirun.openmpi --allow-run-as-root --oversubscribe", "shm");
}

#[test]
#[ignore = "needs PEER mpich"]
fn peer_mpirun_of_mpich() {
    mpirun("mpirun.mpich", "roce");
    mpirun("mpirun.mpich", "shm");
}
