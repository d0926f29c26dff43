//! Whether a port is still what it was when the test began: a cable that is pulled fails every step, each with words of its own that are not the cause.

/// A port, and why it cannot be used, once that was so.
pub(super) struct Watched<'a> {
    pub(super) name: &'a str,
    down: bool,
}

impl<'a> Watched<'a> {
    pub(super) fn new(name: &'a str) -> Self {
        Self { name, down: false }
    }

    /// After a failure: its words, behind those of the port where that is the cause.
    pub(super) fn because(&mut self, said: String) -> String {
        match trouble(self.name) {
            Some(why) => {
                self.down = true;
                format!("{why} (what was seen of it: {said})")
            }
            None => said,
        }
    }

    /// Before a step: that it is not tried and why, if the port was down after another and is so still.
    pub(super) fn still_down(&mut self) -> Option<String> {
        let why = self.down.then(|| trouble(self.name)).flatten();
        self.down = why.is_some();
        why.map(|why| format!("not tried: {why}"))
    }
}

/// Why the port cannot be used now, in the words of who opens it; `None`: it can, as far as its device says.
fn trouble(name: &str) -> Option<String> {
    let (device, number, _) = doorbell::connect::check_verbs_port(name).ok()?;
    let found = doorbell::rdma().ok()?;
    if let Some((_, why)) = found.refused.iter().find(|(name, _)| *name == device) {
        return Some(why.clone());
    }
    let mut ports = found.ports.iter();
    match ports.find(|p| p.device == device && p.port == number) {
        Some(port) => port.unusable.clone(),
        None => Some(format!("RDMA device {device} is not there any more")),
    }
}
