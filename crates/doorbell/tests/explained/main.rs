//! Every action of a fault script, and what four readers say of it: the program itself when its wait is over, another process while it runs,
//! while it is stopped, and when it was killed. All of them name the same stage, and the rule that is to blame.
#![cfg(all(target_os = "linux", not(miri)))]

mod actions;
#[path = "../common/mod.rs"]
mod common;
mod peers;
mod player;
mod records;
mod scenes;

/// What the child plays.
const SCENE: &str = "DOORBELL_TEST_SCENE";
const RULE: &str = "DOORBELL_TEST_RULE";
const SOCKET: &str = "DOORBELL_TEST_SOCKET";

fn var(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

/// Plays a scene.
#[test]
#[ignore = "the other process of this file's tests, which start it"]
fn peer_process() {
    let scene = var(SCENE);
    match scene.split(' ').next().expect("a word") {
        "shm" => scenes::play_shm(&scene),
        "mate" => scenes::play_mate(&scene),
        _ => scenes::play_alone(&scene),
    }
}
