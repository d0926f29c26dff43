//! The exchange of `ibv_rc_pingpong` and `ibv_uc_pingpong`: 52 bytes each way, `LID:QPN:PSN:GID` in hexadecimal digits.
//!
//! The client sends first; the server connects its queue pair and answers; the client connects and sends `done`. Source:
//! libibverbs' examples rc_pingpong.c and uc_pingpong.c (rdma-core 44).

use anyhow::{Context as _, Result, ensure};

use super::{Foreign, Socket, hex};

/// `0000:000000:000000:` and 32 digits, with a zero byte.
pub(crate) const MESSAGE: usize = 52;
const DONE: &[u8; 5] = b"done\0";

/// The message about a queue pair. A RoCE port has no LID.
pub(crate) fn emit(mine: &Foreign) -> [u8; MESSAGE] {
    let gid: String = mine.gid.iter().map(|b| format!("{b:02x}")).collect();
    let text = format!("0000:{:06x}:{:06x}:{gid}", mine.qpn, mine.psn);
    let mut message = [0; MESSAGE];
    for (to, from) in message.iter_mut().zip(text.bytes()) {
        *to = from;
    }
    message
}

/// Reads the message.
pub(crate) fn parse(message: &[u8; MESSAGE]) -> Result<Foreign> {
    let end = message.iter().position(|&b| b == 0).unwrap_or(MESSAGE);
    let shown = || message[..end].escape_ascii().to_string();
    let text = std::str::from_utf8(&message[..end])
        .ok()
        .with_context(|| format!("it sent \"{}\": is it a pingpong?", shown()))?;
    let fields: Vec<&str> = text.split(':').collect();
    let &[lid, qpn, psn, gid] = fields.as_slice() else {
        anyhow::bail!(
            "it sent \"{}\", not LID:QPN:PSN:GID: is it a pingpong?",
            shown()
        );
    };
    hex(lid, 16, "LID")?;
    ensure!(gid.len() == 32, "its GID is {gid:?}, not 32 digits");
    let mut bytes = [0; 16];
    for (i, byte) in bytes.iter_mut().enumerate() {
        // Digits are checked to be ASCII before the text is cut.
        ensure!(gid.is_ascii(), "its GID is {gid:?}, not 32 digits");
        *byte = hex(&gid[2 * i..2 * i + 2], 8, "GID")? as u8;
    }
    Ok(Foreign {
        qpn: hex(qpn, 24, "QPN")? as u32,
        psn: hex(psn, 24, "PSN")? as u32,
        gid: bytes,
    })
}

/// As the client: sends ours, gets theirs. [`ready`] follows once the queue pair is connected.
pub(crate) fn call(socket: &mut Socket, mine: &Foreign) -> Result<Foreign> {
    socket.write(&emit(mine), "this side's queue pair")?;
    parse(&socket.read("its queue pair")?)
}

/// As the client: this side is connected.
pub(crate) fn ready(socket: &mut Socket) -> Result<()> {
    socket.write(DONE, "the word that this side is ready")
}

/// As the server: gets theirs. [`answer`] follows once the queue pair is connected.
pub(crate) fn hear(socket: &mut Socket) -> Result<Foreign> {
    parse(&socket.read("its queue pair")?)
}

/// As the server: sends ours and waits for the other side to be connected.
pub(crate) fn answer(socket: &mut Socket, mine: &Foreign) -> Result<()> {
    socket.write(&emit(mine), "this side's queue pair")?;
    let done: [u8; 5] = socket.read("the word that it is ready")?;
    ensure!(
        done.starts_with(b"done"),
        "{} sent \"{}\" instead of done",
        socket.peer(),
        done.escape_ascii()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINE: Foreign = Foreign {
        qpn: 0x00_0012,
        psn: 0xab_cdef,
        gid: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1],
    };

    #[test]
    fn the_text_is_the_programs() {
        let message = emit(&MINE);
        assert_eq!(
            &message,
            b"0000:000012:abcdef:00000000000000000000ffffc0000201\0"
        );
        assert_eq!(parse(&message).unwrap(), MINE);
    }

    #[test]
    fn what_is_no_pingpong_is_shown() {
        for text in [
            &b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n"[..],
            b"0000:1000012:abcdef:00000000000000000000ffffc0000201",
            b"0000:000012:abcdef:00000000000000000000ffffc00002",
            b"0000:000012:abcdef:0000000000000000000\xc3\xa9ffffc0000201x",
            b"0000:+00012:abcdef:00000000000000000000ffffc0000201",
        ] {
            let mut message = [0; MESSAGE];
            for (to, from) in message.iter_mut().zip(text) {
                *to = *from;
            }
            let error = parse(&message).unwrap_err().to_string();
            assert!(error.starts_with("it"), "{error}");
        }
    }

    #[test]
    fn no_message_panics() {
        let good = emit(&MINE);
        let mut seed = 88_172_645_463_325_252_u64;
        for _ in 0..50_000 {
            let mut bad = good;
            for _ in 0..3 {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                bad[seed as usize % MESSAGE] = (seed >> 32) as u8;
            }
            if let Ok(read) = parse(&bad) {
                assert_eq!(parse(&emit(&read)).unwrap(), read);
            }
        }
    }
}
