"""The loss of each image in the part Images, the way a user looks for images that are never learned."""

from __future__ import annotations

from tests.ui.browser.conftest import Tab
from tests.ui.test_image_losses import BAD, NAMES, trained, write_images


def test_an_image_that_is_never_learned_is_found_and_examined(tab: Tab) -> None:
    folder = write_images(tab.folder / "image losses")
    trained(tab.run("with losses"), folder)
    page = tab.open("/images/view?dir=image+losses")
    page.locator("#shown", has_text=str(len(NAMES))).wait_for()
    page.get_by_label("Losses in").wait_for()
    page.locator("#filters [name=sort]").select_option("loss")
    page.locator("#image-0", has_text=BAD).wait_for()
    page.locator("#filters [name=only]").select_option("never")
    page.locator("#image-1").wait_for(state="hidden")
    page.locator("#image-0").click()
    page.locator("#item still-chart canvas").wait_for()
    assert "empty" in page.locator("#item .image-loss").inner_text()
    tab.settle()
    assert tab.axe() == [] and tab.widest() <= 0
